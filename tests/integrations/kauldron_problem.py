"""Small models for Kauldron, their data, and the plan of a private run."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("kauldron", reason="kauldron is not installed: see docs/developers/testing.md")

from gemma import gm, peft
from kauldron import kd

import dpoptax
from dpoptax.integrations import kauldron as private
from tests.integrations import shared

WORDS, LENGTH, CLASSES = 20, 6, 3
STEPS = 4
make_plan = functools.partial(shared.make_plan, steps=STEPS)
make_chain = shared.make_chain


class Classifier(nn.Module):
    """Looks up words by an index, as large models do, and may drop some of its outputs."""

    dropout: float = 0.0
    words: kd.kontext.Key = "batch.text"

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, 8)(words).mean(-2)
        x = nn.tanh(nn.Dense(8)(x))
        x = kd.nn.Dropout(self.dropout)(x) if self.dropout else x
        return {"logits": nn.Dense(CLASSES)(x)}


class Normalized(nn.Module):
    """Has statistics of a batch."""

    words: kd.kontext.Key = "batch.text"

    @nn.compact
    def __call__(self, words):
        x = nn.BatchNorm(use_running_average=False)(nn.Embed(WORDS, 8)(words).mean(-2))
        return {"logits": nn.Dense(CLASSES)(x)}


def make_gemma():
    """Returns a tiny Gemma 3 with LoRA, which predicts the next words."""
    config = gm.nn.config.TransformerConfig(
        num_embed=WORDS,
        embed_dim=16,
        hidden_dim=32,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(gm.nn.config.AttentionType.LOCAL_SLIDING,),
        sliding_window_size=4,
    )
    network = gm.nn.Transformer(config=config, tokens="batch.text", dtype=jnp.float32)
    return gm.nn.LoRA(rank=2, model=network, dtype=jnp.float32)


def make_rows(size=100):
    rng = np.random.default_rng(0)
    text = rng.integers(1, WORDS, (size, LENGTH))
    return {
        "text": text,
        "label": rng.integers(0, CLASSES, (size, 1)),
        "next": np.roll(text, -1, axis=1)[..., None],
    }


def make_losses(kind="full"):
    labels = "batch.label" if kind == "full" else "batch.next"
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels=labels)
    return {"cross_entropy": loss}


def make_trainer(plan, folder, kind="full", *, rows=None, step=None, **options):
    """Returns a trainer for a model of `kind` "full" or "lora"."""
    step = {"trained": None if kind == "full" else kd.optim.select("lora"), **(step or {})}
    settings = {
        "train_ds": private.plan_batches(plan, make_rows() if rows is None else rows),
        "model": Classifier() if kind == "full" else make_gemma(),
        "optimizer": make_chain(plan),
        "trainstep": private.PrivateTrainStep(plan=plan, **step),
        "train_losses": make_losses(kind),
        "num_train_steps": STEPS - 1,
        "workdir": folder,
        "profiler": None,
        "writer": None,
    }
    return kd.train.Trainer(**{**settings, **options})


def saved_each_step():
    return kd.ckpts.Checkpointer(save_interval_steps=1, max_to_keep=None)


def trained(params, kind="full"):
    """Returns the trained parameters."""
    return params if kind == "full" else peft.split_params(params)[1]


def train_by_hand(plan, chain, params, kind="full", **options):
    """Returns the parameters after a loop that uses neither a trainer nor its losses."""
    model = Classifier() if kind == "full" else make_gemma()
    frozen, params = ({}, params) if kind == "full" else peft.split_params(params)

    @jax.jit
    def step(params, frozen, opt_state, batch, mask):
        def loss_fn(params, row):
            merged = params if kind == "full" else peft.merge_params(frozen, params)
            found = model.apply({"params": merged}, row["text"][None])
            logits = found["logits"] if kind == "full" else found.logits
            labels = row["label"] if kind == "full" else row["next"][None, :, 0]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(losses) / losses.size

        points = dpoptax.gradient_points(opt_state, params)
        grads = dpoptax.clipped_grad(loss_fn, 1.0, **options)(points, batch, mask)
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = chain.init(params)
    for batch in plan.new_run(shared.KEY).batches(make_rows()):
        params, opt_state = step(params, frozen, opt_state, batch.examples, batch.mask)
    return params
