"""Trains LoRA in Gemma 3 270M with tunix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer, utils

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.integrations.tunix import PrivateTrainer, guarantee, plan_batches
from experiments.gemma import weights
from experiments.gemma.problem import LanguageArguments, plain_batches
from experiments.gemma.tokenizer import PADDING


class TunixNetwork:
    """Gemma 3 270M in tunix, with LoRA by qwix in its last layers. See `problem.Network`."""

    def __init__(self, given: LanguageArguments, parameters: dict[str, np.ndarray]) -> None:
        self._given = given
        self._model = make_model(given, parameters)
        self._graph = nnx.graphdef(self._model)
        self._untrained = jax.tree.map(np.asarray, nnx.state(self._model, nnx.LoRAParam))
        self.trained = sum(x.size for x in jax.tree.leaves(self._untrained))

    @property
    def params(self) -> Any:
        """The state of the model."""
        return nnx.state(self._model)

    @property
    def factors(self) -> Any:
        """The LoRA factors among them."""
        return nnx.to_pure_dict(nnx.state(self._model, nnx.LoRAParam))

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the token after each of `tokens`."""
        inputs = make_inputs(make_batch(tokens))
        model = nnx.merge(self._graph, params)
        return model(tokens, inputs["positions"], None, inputs["attention_mask"])[0]

    def train(
        self, plan: dpoptax.PrivacyPlan, tokens: np.ndarray, *, private: bool
    ) -> Guarantee | None:
        """Trains new LoRA factors, and returns the guarantee."""
        given, model = self._given, self._model
        nnx.update(model, jax.tree.map(jnp.asarray, self._untrained))
        config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=plan.steps)
        adam, rows = optax.adam(given.learning_rate), make_batch(tokens)
        if not private:
            parts, batches = plain_batches(given, plan, tokens)
            config = dataclasses.replace(config, gradient_accumulation_steps=parts)
            trainer = peft_trainer.PeftTrainer(model, adam, config)
            trainer.with_gen_model_input_fn(make_inputs).train(map(make_batch, batches))
            return None
        chain = optax.chain(plan.new_run().noise(clip=given.clip), adam)
        private_trainer = PrivateTrainer(
            model, chain, config, plan=plan, clip=given.clip, microbatch_size=given.microbatch_size
        )
        private_trainer.with_gen_model_input_fn(make_inputs).train(plan_batches(plan, rows))
        return guarantee(private_trainer)


def make_batch(tokens: Any) -> peft_trainer.TrainingInput:
    """Returns the input of tunix's trainer for tokens."""
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=tokens != PADDING)


def make_inputs(texts: Any) -> dict[str, Any]:
    """Returns the inputs of the model for a batch of texts."""
    return {
        "input_tokens": texts.input_tokens,
        "input_mask": texts.input_mask,
        "positions": utils.build_positions_from_mask(texts.input_mask),
        "attention_mask": utils.make_causal_attn_mask(texts.input_mask),
    }


def base_model(dtype: Any, parameters: dict[str, np.ndarray]) -> nnx.Module:
    """Returns the pretrained model."""
    config = dataclasses.replace(gemma3.ModelConfig.gemma3_270m(), param_dtype=dtype)
    network = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(network)
    filled = {tuple(path.split(".")): x for path, x in parameters.items()}
    flat = {
        path: x.replace(jnp.asarray(filled.pop(tuple(map(str, path))), dtype))
        for path, x in nnx.to_flat_state(state)
    }
    if filled:
        raise ValueError(f"The model has no parameters {sorted(filled)}.")
    return nnx.merge(graph, nnx.from_flat_state(flat))


def make_model(given: LanguageArguments, parameters: dict[str, np.ndarray]) -> nnx.Module:
    """Returns the pretrained model with LoRA in its last layers."""
    network = base_model(jnp.dtype(given.dtype), parameters)
    numbers = "|".join(map(str, range(weights.LAYERS - given.layers, weights.LAYERS)))
    provider = qwix.LoraProvider(
        module_path=rf"layers/({numbers})/.*(q_einsum|kv_einsum|attn_vec_einsum|_proj)",
        rank=given.rank,
        alpha=2.0 * given.rank,
    )
    text, seen = jnp.zeros((1, 16), int), jnp.ones((1, 16, 16), bool)
    rngs = nnx.Rngs(given.seed)
    return qwix.apply_lora_to_model(network, provider, text, text, None, seen, rngs=rngs)
