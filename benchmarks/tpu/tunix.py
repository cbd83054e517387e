"""Compiles tunix's step and the private step of LoRA in Gemma 3 270M for an absent TPU.

    python -m benchmarks.tpu.tunix [--topology v5e:2x2] [--chips 1] [--json FILE]

Run it with `uv run --no-default-groups --group tunix --group tpu`. The table has the
columns of `python -m benchmarks.tpu`. The steps are those of `PeftTrainer` and `PrivateTrainer`,
with Adam and qwix's LoRA in all linear layers, in bfloat16. Nothing is executed except the random
initialization, on CPU.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer

import dpoptax
from benchmarks.tpu.__main__ import HEADER, Measured, announced, compile_step, ratio_row, row
from benchmarks.tpu.cases import make_mesh
from dpoptax.integrations._run import Inputs
from dpoptax.integrations.tunix import PrivateTrainer
from experiments.gemma.tunix_run import make_inputs

ADAPTED = ".*q_einsum|.*kv_einsum|.*attn_vec_einsum|.*_proj"
AXIS = "fsdp"


def make_model(layers: int, remat: str, rank: int) -> nnx.Module:
    """Returns Gemma 3 270M with random weights and LoRA."""
    config = dataclasses.replace(
        gemma3.ModelConfig.gemma3_270m(),
        num_layers=layers,
        remat_config=gemma3.RematConfig[remat],
    )
    network = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
    text, seen = jnp.zeros((1, 16), int), jnp.ones((1, 16, 16), bool)
    provider = qwix.LoraProvider(module_path=ADAPTED, rank=rank, alpha=2.0 * rank)
    return qwix.apply_lora_to_model(network, provider, text, text, None, seen, rngs=nnx.Rngs(1))


def make_trainer(model: nnx.Module, step: str, batch_size: int) -> peft_trainer.PeftTrainer:
    """Returns the trainer of the "plain" or "private" step."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1, max_steps=1)
    adam = optax.adam(1e-3)
    if step == "plain":
        return peft_trainer.PeftTrainer(model, adam, config).with_gen_model_input_fn(make_inputs)
    plan = dpoptax.PrivacyPlan(
        dataset_size=100 * batch_size, batch_size=batch_size, steps=1, noise_multiplier=1.0
    )
    chain = optax.chain(plan.new_run().noise(), adam)
    return PrivateTrainer(model, chain, config, plan=plan).with_gen_model_input_fn(make_inputs)


def pure_step(trainer: peft_trainer.PeftTrainer) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the trainer's step without side effects, and its state.

    Like tunix, it returns frozen weights without a copy.
    """
    step = trainer.create_train_step_fn()
    kinds = nnx.optimizer.OptState, nnx.LoRAParam
    graph, *state = nnx.split((trainer.model, trainer.optimizer), *kinds, ...)

    def function(opt_state: Any, params: Any, rest: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, opt_state, params, rest)
        shown = step(model, optimizer, batch)
        _, opt_state, params, _ = nnx.split((model, optimizer), *kinds, ...)
        return nnx.as_pure(opt_state), nnx.as_pure(params), shown

    return function, tuple(map(nnx.as_pure, state))


def measure(model: nnx.Module, step: str, mesh: Mesh, batch_size: int, length: int) -> Measured:
    """Compiles the "plain" or "private" step and returns its numbers."""

    def placed(spec: P, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    texts = peft_trainer.TrainingInput(
        input_tokens=placed(P(AXIS), (batch_size, length), jnp.int32),
        input_mask=placed(P(AXIS), (batch_size, length), bool),
    )
    inputs = Inputs(texts, placed(P(AXIS), (batch_size,), bool))
    with mesh:  # the trainer looks for it
        function, state = pure_step(make_trainer(model, step, batch_size))
        state = jax.tree.map(lambda x: placed(P(), x.shape, x.dtype), state)
        return compile_step(function, (*state, texts if step == "plain" else inputs), mesh)


def main(arguments: list[str] | None = None) -> None:
    """Compiles both steps and prints their table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu.tunix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="on all chips")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    remats = [each.name for each in gemma3.RematConfig]
    parser.add_argument("--remat", choices=remats, default="NONE", help="tunix's `RematConfig`")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--chips", type=int, default=1)
    parser.add_argument("--only", choices=["plain", "private"])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    given = parser.parse_args(arguments)
    model = make_model(given.layers, given.remat, given.rank)
    mesh = Mesh(make_mesh(given.topology).devices[: given.chips], (AXIS,))
    name = f"{given.layers} layers, {given.batch_size} × {given.length}, remat {given.remat}"
    found = {}
    print(HEADER)
    for step in ("plain", "private") if given.only is None else (given.only,):
        with announced(f"{name}: compiling the {step} step"):
            found[step] = measure(model, step, mesh, given.batch_size, given.length)
        print(row(name, step, found[step]), flush=True)
    if len(found) == 2:
        print(ratio_row(**found))
    if given.json:
        numbers = {step: dataclasses.asdict(x) for step, x in found.items()}
        given.json.write_text(json.dumps({"case": name, **numbers}, indent=1))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
