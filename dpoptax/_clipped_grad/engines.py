"""Chooses how a clipped sum is computed.

An engine sums the clipped gradients of one micro-batch. All engines return the same sum, except for
rounding. Only the chosen engine is imported.

| method | module | kept of a dense layer `x @ w` for each example |
|:--|:--|:--|
| "vmap" | `per_example_sum` | ∂ℓ/∂w, (R, D) |
| "auto" | `_ghost_clipping.sums.ghost_clipped_sum` | x, (R,), and ∂ℓ/∂y, (D,) |
| "recompute" | `_ghost_clipping.backward.recomputed_sum` | a norm and a limit |
| "streaming" | `_ghost_clipping.backward.streamed_sum` | nothing |

With a grid, or a clip that encodes gradients by more than their norms, "auto" is "vmap".
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax import _losses
from dpoptax._clips.clip import Clip
from dpoptax._losses.read_program import read_program
from dpoptax._losses.trace_loss import Examples, TracedLoss
from dpoptax._points.points import GradientPoints
from dpoptax._support.argument_checks import integer
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import device_of, rounds_products

_METHODS = ("auto", "vmap", "recompute", "streaming")
# Methods that sum each use of a parameter during the backward pass.
_IN_BACKWARD = ("recompute", "streaming")
# Values of `jax_default_matmul_precision` for which TPUs round operands in float32 to bfloat16, and
# recent GPUs to TF32.
_ONE_PASS = (None, "default", "bfloat16", "BF16_BF16_F32")
# Formed gradients of a batch with up to this many numbers share an array. Larger ones cost more
# traffic than kernels.
_BUNDLED_SIZE = 200_000

# `sum(loss, points, examples)` returns the total and the auxiliary outputs at the first point. The
# sums of micro-batches can be added. Engines that sum in the backward pass also take `devices`.
EngineSum: TypeAlias = Callable[..., tuple[PyTree, PyTree]]


class Engine(NamedTuple):
    """Computes clipped sums.

    Attributes:
      sum: sums one micro-batch; see `EngineSum`. The total of "vmap" is complete. That of "auto" is
        a dict of sums by bundles of leaves, with the clip's statistic, and otherwise the summed
        gradient with the statistic.
      join: `join(params, total)` returns a total shaped like the parameters, or as the clip encodes
        it. It runs after the loop over micro-batches, which then carries fewer arrays.
      in_backward: whether the engine sums during the backward pass. On a mesh, it then adds sums
        over devices itself, and the compiler shards the loss.
    """

    sum: EngineSum
    join: Callable[[PyTree, PyTree], PyTree]
    in_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """Holds the options of `clipped_grad` that decide how a sum is computed."""

    clip: Clip
    method: str = "auto"
    precision: str | None = None
    grid: float | None = None
    microbatch_size: int | None = None
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None

    @property
    def needs_gradients(self) -> bool:
        """Returns whether the options require per-example gradients."""
        # Clips that encode by norms need only those, and one statistic of each example.
        by_gradients = self.clip.encodes and not self.clip.by_norms
        return self.method == "vmap" or self.grid is not None or by_gradients

    @property
    def factor_dtype(self) -> DTypeLike | None:
        """Returns the dtype that factors are rounded to, `None` for no rounding.

        It is read while a step is traced, because it depends on JAX's configuration.
        """
        precision = self.precision
        default: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        # By default, factors are rounded as products on this device would round them anyway.
        if precision is None and default in _ONE_PASS:
            precision = "bfloat16" if rounds_products(device_of(self.mesh)) else "float32"
        return jnp.bfloat16 if precision == "bfloat16" else None

    @property
    def bundled_size(self) -> int:
        """Returns the size of the largest formed gradients that share an array with others.

        Fewer arrays are fewer kernels, but XLA's CPU joins arrays slowly. Without the devices of a
        mesh, a step may be compiled for either.
        """
        known = isinstance(self.mesh, jax.sharding.Mesh)
        return _BUNDLED_SIZE if known and device_of(self.mesh).platform != "cpu" else 0


def choose_engine(options: Options) -> Engine:
    """Returns the engine for these options.

    Raises:
      ValueError: an option is unknown, or excludes another.
    """
    check_options(options)
    clip = options.clip
    sums: Callable[..., tuple[PyTree, PyTree]]
    if options.needs_gradients:
        from dpoptax._clipped_grad.per_example_sum import per_example_sum

        sums = functools.partial(per_example_sum, clip=clip, grid=options.grid)
        # The sum of explicit gradients is complete: each was encoded before the sum.
        return Engine(sums, lambda params, total: total)
    if options.method not in _IN_BACKWARD:
        from dpoptax._ghost_clipping.sums.ghost_clipped_sum import ghost_clipped_sum, join_sums

        sums = functools.partial(ghost_clipped_sum, bundled_size=options.bundled_size)
        read_and_sum = functools.partial(_read_and_sum, sums, options)
        return Engine(read_and_sum, functools.partial(join_sums, clip))
    if options.method == "streaming":
        from dpoptax._ghost_clipping.backward.streamed_sum import streamed_sum as sums
    else:
        from dpoptax._ghost_clipping.backward.recomputed_sum import recomputed_sum as sums
    # The total is the pair of the summed gradient and the clip's statistic.
    join = lambda params, total: clip.join(*total)  # noqa: E731
    return Engine(functools.partial(_read_and_sum, sums, options), join, in_backward=True)


def check_options(options: Options) -> None:
    """Raises an error if an option is unknown, or excludes another."""
    if options.method not in _METHODS:
        names = ", ".join(map(repr, _METHODS))
        raise ValueError(f"`method` must be one of {names}, got {options.method!r}.")
    if options.precision not in (None, "float32", "bfloat16"):
        raise ValueError(
            f"`precision` must be 'float32', 'bfloat16' or `None`, got {options.precision!r}."
        )
    if (grid := options.grid) is not None and not (grid > 0.0 and math.frexp(grid)[0] == 0.5):
        raise ValueError(
            f"`grid` must be a power of two, got {grid}. Take it from "
            "`dpoptax.extend.fixed_point_grid`."
        )
    if options.microbatch_size is not None:
        checked_size(options.microbatch_size)
    if options.method in _IN_BACKWARD:
        _check_in_backward(options)
    elif options.needs_gradients and options.precision == "bfloat16":
        raise ValueError(
            "`precision` must be 'float32' for per-example gradients, got 'bfloat16'. They are "
            f"taken for method={options.method!r}, grid={options.grid}, clip={options.clip}."
        )


def checked_size(microbatch_size: int) -> int:
    """Returns the size, or raises an error if it is not a positive integer."""
    remedy = "leave it out for a size that suits the device, or pass the batch size for all at once"
    return integer("microbatch_size", microbatch_size, 1, remedy)


def _check_in_backward(options: Options) -> None:
    """Raises an error if options exclude a sum during the backward pass."""
    option = f"`method={options.method!r}`"
    if options.needs_gradients:
        raise ValueError(
            f"{option} must be computed without per-example gradients, got grid={options.grid} "
            f"and clip={options.clip}."
        )
    if options.mesh is not None and options.microbatch_size is not None:
        raise ValueError(
            f"`microbatch_size` must be `None` for {option} on a mesh, got "
            f"{options.microbatch_size}. Use `jax.checkpoint` in the loss to save memory."
        )
    clip = options.clip
    if options.method == "streaming" and not clip.splits:
        raise ValueError(
            f"{option} must have a `per_layer_clip` of bounds that can be split over the parts of "
            f"a layer, got {clip}. Pass for example `dpoptax.per_layer_clip(1.0)`, or use "
            "method='recompute' for a clip of the whole gradient."
        )


def _read_and_sum(
    sums: Callable[..., tuple[PyTree, PyTree]],
    options: Options,
    loss: TracedLoss,
    points: GradientPoints,
    examples: Examples,
    **over: Any,
) -> tuple[PyTree, PyTree]:
    """Reads the program of a loss, and sums its clipped gradients with `sums`."""
    program, dtype = read_program(loss), options.factor_dtype
    if program.unused:
        _losses.zero_gradients.warn_of_unused(program, points.points[0])
    return sums(program, options.clip, points, examples, factor_dtype=dtype, **over)
