"""Defines the networks whose steps are measured, and the contenders for each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import models
from benchmarks.models import Problem
from benchmarks.tpu.architectures import Architecture, gpt2, resnet_18, vit_s


class Contender(NamedTuple):
    """An implementation of a step: a key of `CONTENDERS` and its options.

    Attributes:
      graphs: whether XLA starts loops and conditionals as parts of CUDA graphs.
    """

    library: str
    microbatch_size: int | None = None
    algorithm: str = "dp-sgd"
    graphs: bool = False

    def __str__(self) -> str:
        algorithm = "" if self.algorithm == "dp-sgd" else f", {self.algorithm}"
        size = "" if self.microbatch_size is None else f", microbatch_size={self.microbatch_size}"
        return self.library + algorithm + size + (", graphs" if self.graphs else "")

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA for the step."""
        return {"xla_gpu_enable_command_buffer": _IN_GRAPHS} if self.graphs else {}


_IN_GRAPHS = (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,DYNAMIC_SLICE_COPY_FUSION,"
    "CONDITIONAL,WHILE"
)


class Network(NamedTuple):
    """A network, its batch size and its contenders, the non-private one first.

    Attributes:
      problem: makes the problem.
      batch_size: examples per step.
      contenders: those to compare.
      seconds: how long each contender takes to compile and measure on a GPU.
    """

    problem: Callable[[], Problem]
    batch_size: int
    contenders: tuple[Contender, ...]
    seconds: float


PLAIN, AUTO, FLOAT32 = map(Contender, ("non-private", "dpoptax auto", "dpoptax float32"))
RECOMPUTE, CONTRIB = Contender("dpoptax recompute"), Contender("optax.contrib")
DISK = Contender("dpoptax auto", algorithm="disk")
PLAIN_GRAPHS, GRAPHS, DISK_GRAPHS = (each._replace(graphs=True) for each in (PLAIN, AUTO, DISK))
# On GPUs with TF32, the default of "auto" is bfloat16.
OURS = (PLAIN, AUTO, FLOAT32)
PEER = Contender("jax_privacy")


def in_parts(contender: Contender, size: int) -> Contender:
    """Returns the contender in micro-batches."""
    return contender._replace(microbatch_size=size)


def problem_of(architecture: Architecture) -> Problem:
    """Returns a problem with random parameters and data."""
    rng = np.random.default_rng(0)

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def make_batch(size: int) -> Any:
        def make(x: jax.ShapeDtypeStruct) -> jax.Array:
            integers = jnp.issubdtype(x.dtype, jnp.integer)
            shape = (size, *x.shape)
            return jnp.asarray(rng.integers(10, size=shape) if integers else normal(shape), x.dtype)

        return jax.tree.map(make, architecture.example)

    # By NumPy, since JAX would compile a generator for every shape.
    params = jax.tree.map(lambda x: jnp.asarray(0.02 * normal(x.shape)), architecture.params)

    return Problem(params, architecture.loss_fn, make_batch)


def gpt2_problem(length: int, **options: Any) -> Problem:
    """Returns GPT-2 with random tokens of the whole vocabulary."""
    problem = problem_of(gpt2(length, **options))
    vocabulary = problem.params["tokens"].shape[0]

    def make_batch(size: int) -> jax.Array:
        tokens = np.random.default_rng(1).integers(vocabulary, size=(size, length + 1))
        return jnp.asarray(tokens, jnp.int32)

    return problem._replace(make_batch=make_batch)


def lora_problem(length: int, rank: int = 8, **options: Any) -> Problem:
    """Returns GPT-2 with frozen weights and corrections x A B of all projections."""
    problem, names = gpt2_problem(length, **options), ("qkv", "mix", "up", "down")
    frozen = problem.params

    def pair(kernel: jax.Array) -> dict[str, jax.Array]:
        layers, rows, columns = kernel.shape
        a = np.random.default_rng(2).standard_normal((layers, rows, rank), np.float32)
        return {"a": jnp.asarray(0.02 * a), "b": jnp.zeros((layers, rank, columns))}

    def loss_fn(frozen: Any, params: Any, tokens: jax.Array) -> jax.Array:
        corrected = {name: frozen["blocks"][name] | params[name] for name in names}
        return problem.loss_fn(frozen | {"blocks": frozen["blocks"] | corrected}, tokens)

    params = {name: pair(frozen["blocks"][name]["kernel"]) for name in names}
    return Problem(params, loss_fn, problem.make_batch, frozen)


def _lm(**options: Any) -> Callable[[], Problem]:
    return partial(gpt2_problem, **options)


def _of(architecture: Callable[..., Architecture], **options: Any) -> Callable[[], Problem]:
    return lambda: problem_of(architecture(**options))


def _vit(**options: Any) -> Callable[[], Problem]:
    return _of(vit_s, pixels=224, patch=16, **options)


def _wrn_16_4() -> Problem:
    from benchmarks.networks import wrn_16_4

    return wrn_16_4()


LONG = {"length": 4096, "remat": True, "query_block": 512}
HALF = {"dtype": "bfloat16"}
# Per-example gradients of convolutions may compile for minutes, so they come last.
NETWORKS: dict[str, Network] = {
    "GPT-2, T=128": Network(_lm(length=128), 64, (*OURS, in_parts(PEER, 8)), 12),
    "GPT-2, T=128, bfloat16": Network(_lm(length=128, **HALF), 64, OURS, 12),
    "ResNet-18": Network(_of(resnet_18), 256, (*OURS, in_parts(AUTO, 64)), 16),
    "GPT-2, T=1024": Network(_lm(length=1024), 8, (*OURS, in_parts(PEER, 4)), 12),
    "MLP": Network(
        models.mlp, 256, (*OURS, DISK, PLAIN_GRAPHS, GRAPHS, DISK_GRAPHS, PEER, CONTRIB), 3
    ),
    "WRN-16-4": Network(_wrn_16_4, 256, (PLAIN, AUTO), 16),
    "ViT-S, 224": Network(_vit(), 64, (PLAIN, AUTO, in_parts(PEER, 16)), 10),
    "LoRA on GPT-2, T=128": Network(partial(lora_problem, 128), 64, (PLAIN, AUTO, PEER), 12),
    "GPT-2, T=4096": Network(_lm(**LONG), 2, (PLAIN, AUTO, RECOMPUTE), 14),
    "GPT-2, T=1024, bfloat16": Network(_lm(length=1024, **HALF), 8, OURS, 12),
    "CNN": Network(models.cnn, 256, (*OURS, PLAIN_GRAPHS, GRAPHS), 6),
    "GPT-2, T=128, DiSK": Network(_lm(length=128), 64, (PLAIN, DISK), 14),
    "ResNet-18, bfloat16": Network(_of(resnet_18, **HALF), 256, OURS, 16),
    "CNN, peers": Network(models.cnn, 256, (PLAIN, PEER, CONTRIB), 10),
    "ResNet-18, peers": Network(_of(resnet_18), 256, (PLAIN, in_parts(PEER, 64), CONTRIB), 20),
    "WRN-16-4, peers": Network(_wrn_16_4, 256, (PLAIN, in_parts(PEER, 64)), 20),
    "ViT-S, 224, bfloat16": Network(_vit(**HALF), 64, OURS, 10),
    "GPT-2, T=4096, bfloat16": Network(_lm(**LONG, **HALF), 2, (*OURS, RECOMPUTE), 14),
}
_TINY = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64}
SMALL: dict[str, Network] = {
    "MLP": Network(models.mlp, 8, (*OURS, DISK, GRAPHS, PEER, CONTRIB), 3),
    "GPT-2, tiny": Network(_lm(length=8, **_TINY), 4, (*OURS, in_parts(PEER, 2)), 10),
    "LoRA on GPT-2, tiny": Network(partial(lora_problem, 8, **_TINY), 4, (PLAIN, AUTO), 10),
}
