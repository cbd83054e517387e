"""A tiny language model for tunix, its texts, and the plan of a private run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("tunix", reason="tunix is not installed: see docs/developers/testing.md")

import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer

import dpoptax
from dpoptax.integrations import tunix as private
from experiments.gemma.tunix_run import make_inputs
from tests.integrations import shared

WORDS, WIDTH, LENGTH = 20, 8, 6
STEPS = 6
make_plan = functools.partial(shared.make_plan, steps=STEPS)
make_chain = shared.make_chain


class Decoder(nnx.Module):
    """A model that looks up its words by an index, as large models do."""

    def __init__(self, rngs, dropout=0.0):
        self.words = nnx.Param(jax.random.normal(rngs.params(), (WORDS, WIDTH)))
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, WORDS, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, tokens, positions, cache, attention_mask):
        x = self.words[tokens] + positions[..., None] / LENGTH
        seen = attention_mask / attention_mask.sum(-1, keepdims=True)
        x = nnx.tanh(self.inner(seen @ x))
        return self.outer(self.dropout(x) if self.dropout else x), cache


def make_model(kind="full", dropout=0.0):
    """Returns a model of `kind` "full" or "lora"."""
    model = Decoder(nnx.Rngs(0, dropout=1) if dropout else nnx.Rngs(0), dropout)
    if kind == "full":
        return model
    provider = qwix.LoraProvider(module_path="inner|outer", rank=2, alpha=2.0)
    text = jnp.zeros((1, LENGTH), int)
    mask = jnp.ones((1, LENGTH, LENGTH))
    return qwix.apply_lora_to_model(model, provider, text, text, None, mask, rngs=nnx.Rngs(1))


def make_gemma(kind="lora", remat="NONE", *, sharded=False):
    """Returns a tiny Gemma 3 in float32 of `kind` "full" or "lora"."""
    sharding = gemma3.ShardingConfig.get_default_sharding()
    config = gemma3.ModelConfig(
        num_layers=2, num_embed=32, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8,
        num_kv_heads=1, sliding_window_size=4, param_dtype=jnp.float32,
        remat_config=gemma3.RematConfig[remat],
        **({"shd_config": sharding} if sharded else {}),
    )  # fmt: skip
    model = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
    if kind == "full":
        return model
    text, mask = jnp.zeros((1, LENGTH), int), jnp.ones((1, LENGTH, LENGTH), bool)
    provider = qwix.LoraProvider(module_path=".*q_einsum|.*_proj", rank=2, alpha=2.0)
    return qwix.apply_lora_to_model(model, provider, text, text, None, mask, rngs=nnx.Rngs(1))


def make_rows(size=100):
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, LENGTH + 1, size=(size, 1))
    return peft_trainer.TrainingInput(
        input_tokens=rng.integers(0, WORDS, (size, LENGTH)), input_mask=np.arange(LENGTH) < lengths
    )


def make_config(**options):
    return peft_trainer.TrainingConfig(**{"eval_every_n_steps": 2, "max_steps": STEPS, **options})


def make_trainer(plan, model=None, chain=None, *, clip=1.0, options=(), **config):
    """Returns a trainer with the settings of `config` and `options` of `clipped_grad`."""
    return private.PrivateTrainer(
        make_model() if model is None else model,
        make_chain(plan) if chain is None else chain,
        make_config(**config),
        plan=plan,
        clip=clip,
        **dict(options),
    ).with_gen_model_input_fn(make_inputs)


def trained(trainer):
    """Returns the trained parameters."""
    return nnx.as_pure(nnx.state(trainer.model, trainer.optimizer.wrt))


def train_by_hand(plan, model, chain, kind, **options):
    """Returns the parameters after a loop that uses no trainer."""
    graph, params, rest = nnx.split(model, nnx.LoRAParam if kind == "lora" else nnx.Param, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)

    @jax.jit
    def step(params, rest, opt_state, batch, mask):
        def loss_fn(params, text):
            tokens, real = text.input_tokens, text.input_mask
            seen = jnp.tri(LENGTH, dtype=bool) & real
            positions = jnp.cumsum(real) - 1
            logits, _ = nnx.merge(graph, params, rest)(
                tokens[None], positions[None], None, seen[None]
            )
            found = jax.nn.log_softmax(logits[0, :-1]) * jax.nn.one_hot(
                tokens[1:], logits.shape[-1]
            )
            losses = -jnp.sum(found * real[1:, None])
            return losses / (jnp.sum(real[1:]) + 1e-8)

        grad_fn = dpoptax.clipped_grad(loss_fn, 1.0, **options)
        grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = chain.init(params)
    for batch in plan.new_run(shared.KEY).batches(make_rows()):
        params, opt_state = step(params, rest, opt_state, batch.examples, batch.mask)
    return params
