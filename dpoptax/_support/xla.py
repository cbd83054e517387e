"""Works around XLA: materializes arrays, hides numbers, stacks small arrays, checks settings.

docs/developers/jax-internals.md lists the workarounds with their tests.
"""

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._support.tree import Tree

# Compute capability of the first GPUs with TF32, those of the Ampere generation.
_TF32_CAPABILITY = 8.0
# With these settings, XLA or a library that it calls may reorder sums, ignore NaN, or round the
# operands of products that need full precision.
_FORBIDDEN_FLAGS = re.compile(
    "--(xla_cpu_enable_fast_math|xla_enable_fast_math|xla_gpu_default_to_alg_dot_bf16_bf16_f32)"
    r"(?!=(?i:false|0)(\s|$))(=\S*)?(\s|$)"
)
_FORBIDDEN_VARIABLES = {"NVIDIA_TF32_OVERRIDE": ("0",), "ONEDNN_DEFAULT_FPMATH_MODE": ("STRICT",)}


def out_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of an array to combine with `x`; `None` if XLA infers it.

    Under explicit mesh axes, an array without it would be computed completely on every device.
    """
    sharding = jax.typeof(x).sharding
    return sharding if any(axis is not None for axis in sharding.spec) else None


def on_each_device(
    function: Callable[[jax.Array], Tree], like: Sequence[jax.Array]
) -> Callable[[jax.Array], Tree]:
    """Returns `function`, computed completely on each device that holds parts of arrays.

    Otherwise XLA may shard its results, and exchange parts where they are used. The type of an
    array contains its mesh, even if the axes are automatic and the type does not show the sharding.
    """
    kinds: list[Any] = [jax.typeof(x) for x in like]
    around = jax.sharding.get_abstract_mesh()
    mesh = next((x.sharding.mesh for x in kinds if not x.sharding.mesh.empty), around)
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return function
    whole = jax.sharding.PartitionSpec()
    mapped: Callable[[jax.Array], Tree] = jax.shard_map(
        function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    return mapped


def places(
    shape: tuple[int, ...],
    strides: Sequence[int] | None = None,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Numbers the elements in row-major order, or with the given strides.

    The sum of iotas along each axis can be sharded over devices. Beyond 2³² elements, some would
    get the same number, and so the same noise.
    """
    strides = strides or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if math.prod(shape) > 2**32:
        raise ValueError(
            "A parameter must have at most 2³² numbers to get noise, got "
            f"{math.prod(shape)}. Split it into two."
        )
    numbers = jnp.uint32(0)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if axis == 0 or size > 1:  # axis 0 sets the shape
            along = lax.broadcasted_iota(np.uint32, shape, axis, out_sharding=out_sharding)
            numbers += np.uint32(stride if size > 1 else 0) * along
    return numbers


def materialize(tree: Tree, kind: DTypeLike = jnp.inexact) -> Tree:
    """Returns `tree` with its arrays of dtype `kind` computed and stored once.

    A norm and the sum that it bounds must read the same numbers. XLA may compute an array again in
    each kernel that reads it, with different rounding. If terms cancel, the two results may have
    nothing in common. On TPU and GPU an optimization barrier prevents this. On CPU, barriers are
    removed before fusion, but the result of a conditional is stored. A barrier hides its predicate
    while XLA simplifies conditionals.
    """
    leaves, structure = jax.tree.flatten(tree)
    chosen = [i for i, x in enumerate(leaves) if x.size and jnp.issubdtype(x.dtype, kind)]
    # Outside of a trace, each operation runs separately and stores its result.
    if not any(isinstance(leaves[i], jax.core.Tracer) for i in chosen):
        return tree
    arrays = [leaves[i] for i in chosen]
    barriers = dict.fromkeys(("cuda", "rocm", "tpu"), lax.optimization_barrier)
    with jax.named_scope("materialize"):  # tests/clipped_grad/hlo_test.py looks for this name
        arrays = lax.platform_dependent(
            arrays, cpu=_through_branch, **barriers, default=_after_empty_loop
        )
    stored = dict(zip(chosen, arrays, strict=True))
    found: Tree = jax.tree.unflatten(structure, [stored.get(i, x) for i, x in enumerate(leaves)])
    return found


def _through_branch(arrays: list[jax.Array]) -> list[jax.Array]:
    """Passes arrays through a conditional, whose branch XLA on CPU does not know.

    It is not fused, keeps arrays in place, and needs no kernel. The barrier in the other branch
    hides that it does not change them either.
    """
    never = lax.optimization_barrier(jnp.zeros([], bool))
    # Where an axis of length 1 is in the layout would decide whether XLA copies the array.
    ones = [tuple(i for i, n in enumerate(x.shape) if n == 1) for x in arrays]
    squeezed = list(map(lax.squeeze, arrays, ones))
    kept = lax.cond(never, lax.optimization_barrier, lambda x: x, squeezed)
    return list(map(lax.expand_dims, kept, ones))


def _after_empty_loop(arrays: list[jax.Array]) -> list[jax.Array]:
    """Passes arrays through a loop of zero iterations, whose body changes them.

    XLA may replace a conditional by a selection once it has removed barriers, but no loop.
    """
    never = lax.optimization_barrier(jnp.zeros([], jnp.int32))
    _, kept = lax.while_loop(
        lambda carry: carry[0] < never,
        lambda carry: (carry[0] + 1, list(map(lax.neg, carry[1]))),
        (jnp.zeros_like(never), arrays),
    )
    return kept


def device_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None) -> jax.Device:
    """Returns a device of the mesh, or JAX's default device if the mesh names none."""
    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[0]


def rounds_products(device: jax.Device) -> bool:
    """Returns whether products of float32 round their operands by default on this device.

    TPUs round them to bfloat16, and NVIDIA GPUs since Ampere to TF32.
    """
    if device.platform == "tpu":
        return True
    # A number such as "8.0". AMD's GPUs have names, such as "gfx942".
    capability = getattr(device, "compute_capability", "")
    return bool(re.fullmatch(r"\d+\.\d+", capability)) and float(capability) >= _TF32_CAPABILITY


def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds an array to a narrower dtype, once for all readers.

    In kernels that it fuses with a reader, XLA on GPU drops a conversion to a dtype and back. It
    keeps `reduce_precision`.
    """
    # https://github.com/openxla/xla/issues/41605; `xla_allow_excess_precision` permits it.
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def opaque_integers(numbers: Sequence[int]) -> list[jax.Array]:
    """Returns numbers as int32 scalars that XLA cannot fold as constants on CPU.

    Elsewhere they are constants, because a GPU asks the host at each iteration of a loop.
    """
    known = lambda: [jnp.int32(n) for n in numbers]  # noqa: E731
    found: list[jax.Array] = lax.platform_dependent(
        cpu=lambda: _through_branch(known()), default=known
    )
    return found


def unstack(*stacks: jax.Array) -> list[list[jax.Array]]:
    """Returns the slices of each stack, at indices that XLA cannot fold.

    XLA fuses a slice with its readers, and compiles a kernel for each constant index. If indices
    are read from memory, one kernel serves all slices of a shape.
    """
    sizes = [stack.shape[0] for stack in stacks]
    traced = any(isinstance(stack, jax.core.Tracer) for stack in stacks)
    if max(sizes) == 1 or not traced:
        return [list(jnp.unstack(stack)) for stack in stacks]
    indices = opaque_integers(range(max(sizes)))
    part = functools.partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return [
        [part(x, i) for i in indices[:n]] if n > 1 else [x[0]]
        for x, n in zip(stacks, sizes, strict=True)
    ]


def map_range(function: Callable[[jax.Array], Tree], count: int) -> Tree:
    """Returns function(0), …, function(count - 1), stacked, computed one after the other.

    The loop counts by itself. `lax.map` over a range would read each number from memory, and on a
    TPU every operation on a scalar is a kernel.
    """
    _, found = lax.scan(lambda i, _: (i + 1, function(i)), jnp.int32(0), length=count)
    stacked: Tree = found
    return stacked


def cut_along(x: jax.Array, start: jax.Array | int, size: int, axis: int) -> jax.Array:
    """Returns part of an array, from a start that is not negative."""
    starts: list[jax.Array | int] = [0] * x.ndim
    starts[axis] = start
    sizes = [*x.shape[:axis], size, *x.shape[axis + 1 :]]
    found: jax.Array = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
    return found


def once(draw: Callable[[], Tree], key: jax.Array) -> Tree:
    """Returns `draw()`, drawn with a key, computed once for all uses.

    On CPU, XLA would fuse the draw into each use, such as the output of a filter and its buffer. It
    would then be computed twice, with parts stored in memory.
    """
    if not isinstance(key, jax.core.Tracer):  # outside jit nothing is fused
        return draw()
    draw = jax.jit(draw)  # traced once for both platforms
    found: Tree = lax.platform_dependent(cpu=lambda: materialize(draw(), jnp.number), default=draw)
    return found


def check_settings() -> None:
    """Raises an error if the environment breaks assumptions about rounding.

    Raises:
      RuntimeError: a flag or variable is set that makes arithmetic less exact than the clipping
        bound assumes.
    """
    if found := _FORBIDDEN_FLAGS.search(_xla_flags()):
        raise RuntimeError(
            f"XLA_FLAGS sets `{found[0].strip()}`, under which the compiler may reorder sums, "
            "ignore NaN or round operands, so the sensitivity of a clipped sum would not hold. "
            "Remove the flag and restart Python."
        )
    for name, allowed in _FORBIDDEN_VARIABLES.items():
        value = os.environ.get(name)
        if value and value.upper() not in allowed:
            raise RuntimeError(
                f"`{name}={value}` lets products round their operands, so the sensitivity of a "
                "clipped sum would not hold. Unset the variable and restart Python."
            )


def _xla_flags() -> str:
    """Returns the flags in `XLA_FLAGS`, or in the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-") and Path(flags).is_file():
        return Path(flags).read_text("utf-8", "replace")
    return flags


def keeps_order(values: jax.Array) -> jax.Array:
    """Returns whether the program adds in the written order and keeps NaN, per value.

    This also detects options that are not in the environment, such as `jax.jit(...,
    compiler_options={"xla_cpu_enable_fast_math": True})`.

    Args:
      values: integers that the compiler cannot know, such as bits of private numbers.
    """
    mantissa = values.astype(jnp.int32) & 0x7FFFFF
    number, nan = (  # in [1, 2), and NaN
        lax.bitcast_convert_type(mantissa | pattern, jnp.float32)
        for pattern in (jnp.int32(0x3F800000), jnp.int32(0x7FC00000))
    )
    # 2^-30 is lost next to 1. A compiler that reorders sums cancels `number` instead.
    return ((number + 2.0**-30) - number == 0) & (nan != nan)
