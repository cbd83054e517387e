"""Trains LoRA in Gemma 3 270M with Kauldron."""

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from gemma import gm, peft
from kauldron import kd

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.integrations.kauldron import PrivateTrainStep, guarantee, plan_batches
from experiments.gemma import weights
from experiments.gemma.problem import LanguageArguments
from experiments.gemma.tokenizer import PADDING


@dataclasses.dataclass(frozen=True, eq=False)
class _Pretrained(kd.ckpts.InitTransform):
    """Starts a run from given parameters."""

    params: Any

    def transform(self, state: Any) -> Any:
        """Returns the state with copies of the parameters, because Kauldron's step donates them."""
        return state.replace(params=jax.tree.map(jnp.array, self.params))


class KauldronNetwork:
    """Gemma 3 270M of the package gemma, with LoRA in its last layers. See `problem.Network`."""

    def __init__(self, given: LanguageArguments, parameters: dict[str, np.ndarray]) -> None:
        self._given = given
        dtype = jnp.dtype(given.dtype)
        network = gm.nn.Transformer(config=make_config(), tokens="batch.tokens", dtype=dtype)
        self._model = gm.nn.LoRA(rank=given.rank, model=network, dtype=jnp.float32)

        def start(key: jax.Array) -> Any:
            """Returns the random weights, which are never computed, and the LoRA factors."""
            return peft.split_params(self._model.init(key, jnp.zeros((1, 8), int))["params"])

        frozen, _ = jax.eval_shape(start, jax.random.key(0))
        lora = jax.jit(lambda key: start(key)[1])(jax.random.key(given.seed))
        values = {path: jnp.asarray(x, dtype) for path, x in weights.renamed(parameters)}
        filled = fill(frozen, values)
        self._untrained = peft.merge_params(filled, lora)
        self._params = self._untrained
        numbers = "|".join(map(str, range(weights.LAYERS - given.layers, weights.LAYERS)))
        self._trained = kd.optim.select(rf"layer_({numbers})\..*lora\..*")
        chosen = zip(*map(jax.tree.leaves, (lora, self._trained(lora))), strict=True)
        self.trained = sum(x.size for x, is_trained in chosen if is_trained)

    @property
    def params(self) -> Any:
        """The parameters of the model."""
        return self._params

    @property
    def factors(self) -> Any:
        """The LoRA factors among them."""
        return peft.split_params(self._params)[1]

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the token after each of `tokens`."""
        return self._model.apply({"params": params}, tokens).logits

    def train(
        self, plan: dpoptax.PrivacyPlan, tokens: np.ndarray, *, private: bool
    ) -> Guarantee | None:
        """Trains new LoRA factors, and returns the guarantee."""
        given, mask = self._given, self._trained
        self._params = None
        rows = make_rows(tokens)
        adam = optax.adam(given.learning_rate)
        settings: dict[str, Any] = {
            "model": self._model,
            "init_transform": _Pretrained(self._untrained),
            "train_losses": {
                "next": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                    logits="preds.logits", labels="batch.next", mask="batch.real"
                )
            },
            "num_train_steps": plan.steps - 1,  # Kauldron runs one step more
            "profiler": None,
            "writer": None,
        }
        with tempfile.TemporaryDirectory() as folder:
            if private:
                trainer = kd.train.Trainer(
                    workdir=folder,
                    train_ds=plan_batches(plan, rows),
                    optimizer=optax.chain(plan.new_run().noise(clip=given.clip), adam),
                    trainstep=PrivateTrainStep(
                        plan=plan,
                        clip=given.clip,
                        trained=mask,
                        microbatch_size=given.microbatch_size,
                    ),
                    **settings,
                )
            else:
                trainer = kd.train.Trainer(
                    workdir=folder,
                    train_ds=kd.data.InMemoryPipeline(
                        loader=lambda: rows,
                        batch_size=given.batch_size,
                        shuffle=True,
                        seed=given.seed,
                    ),
                    optimizer=kd.optim.partial_updates(adam, mask=mask),
                    **settings,
                )
            state, _ = trainer.train()
        self._params = state.params
        return guarantee(trainer, state) if private else None


def make_config() -> Any:
    """Returns the configuration of `gm.nn.Gemma3_270M`.

    That class cannot be imported with kauldron 1.4.2 and gemma 3.3.0, whose `gm.ckpts` asks for
    `kd.ckpts.AbstractPartialLoader`.
    """
    kind = gm.nn.config.AttentionType
    pattern = (*[kind.LOCAL_SLIDING] * 5, kind.GLOBAL)
    return gm.nn.config.TransformerConfig(
        num_embed=262_144,
        embed_dim=640,
        hidden_dim=2048,
        num_heads=weights.HEADS,
        head_dim=weights.HEAD_SIZE,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=pattern * (weights.LAYERS // len(pattern)),
        sliding_window_size=512,
        transpose_gating_einsum=True,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
    )


def make_rows(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the inputs of the model, the next tokens, and a mask that excludes padding."""
    following = tokens[:, 1:, None]
    return {"tokens": tokens[:, :-1], "next": following, "real": following != PADDING}


def fill(shapes: Any, values: Mapping[str, jax.Array]) -> Any:
    """Returns a tree with the values, or raises an error if paths or shapes do not match."""
    wanted = {path: x.shape for path, x in traverse_util.flatten_dict(shapes, sep="/").items()}
    found = {path: x.shape for path, x in values.items()}
    if wanted != found:
        differing = sorted(path for path, _ in wanted.items() ^ found.items())
        raise ValueError(f"The parameters of the model and of the file differ in {differing}.")
    return traverse_util.unflatten_dict(dict(values), sep="/")
