"""Tests that compiled programs of a clipped sum keep the operations that the proof requires.

Programs are compiled for this CPU and, if `libtpu` or `jax[cuda12]` is installed, ahead of time for
a TPU or a GPU. None of them runs. See "Compiler transformations" in docs/developers/bound.md.
"""

import importlib.util
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._rounding import block_sums
from tests import helpers, programs

pytestmark = pytest.mark.optimized

SIZE = 8
CLIP = dpoptax.l2_clip(0.1)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (.+?) ([a-z][\w-]*)\((.*)$")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TYPE = re.compile(r"^(\w+)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """Describes an instruction of a compiled program."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    operation: str
    operands: list[str]
    text: str
    scope: str
    root: bool


def computations(text):
    """Returns the instructions of each computation in an HLO text."""
    found = []
    for line in text.splitlines():
        if line.rstrip().endswith("{") and not line.startswith(" "):
            found.append([])
        match = _INSTRUCTION.match(line)
        if not match or not found:
            continue
        name, kind, operation, rest = match.groups()
        typed = _TYPE.match(kind)
        dtype, sizes = typed.groups() if typed else ("tuple", "")
        scope = _SCOPE.search(rest)
        found[-1].append(
            Instruction(
                name, dtype, tuple(map(int, sizes.split(","))) if sizes else (), operation,
                re.findall(r"%([\w.-]+)", rest.split("metadata=")[0]), rest,
                scope[1] if scope else "", line.lstrip().startswith("ROOT"),
            )
        )  # fmt: skip
    return found


def _scaled(params):
    return jax.tree.map(lambda p: p * 8.0, params)


def _bundle(name, points=1, clip=CLIP, **options):
    """Returns a program whose parameters are multiplied by 8, and the shapes of its arguments."""
    loss, shapes, data = (programs.PROGRAMS | programs.MODELS)[name]
    params = programs.parameters(shapes)

    def total(params, *batch):
        weights = (3.0, -2.0) if points > 1 else (1.0,)
        # Equal points would be merged by the compiler.
        places = tuple(jax.tree.map(lambda p, j=j: p * (1.0 + j), params) for j in range(points))
        there = dpoptax.GradientPoints(places, weights)
        grad_fn = dpoptax.clipped_grad(lambda p, e: loss(_scaled(p), e), clip, **options)
        return grad_fn(there, batch).sum

    arguments = params, *(jnp.ones((SIZE, *s)) for s in data)
    return total, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


PROGRAMS = {
    "inner products": lambda: _bundle("short"),
    "groups": lambda: _bundle("batched"),
    "made of parameters": lambda: _bundle("standardized"),
    "points": lambda: _bundle("regression", points=2),
    "bfloat16": lambda: _bundle("regression", precision="bfloat16"),
    "tied": lambda: _bundle("tied"),
    "recompute": lambda: _bundle("scanned", method="recompute"),
    "streaming": lambda: _bundle("scanned", clip=dpoptax.per_layer_clip(0.1), method="streaming"),
}


def _for_cpu(total, shapes):
    if jax.default_backend() != "cpu":
        pytest.skip("the names of operations are those of XLA on CPU")
    return jax.jit(total).lower(*shapes)


def _for_tpu(total, shapes):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: uv run --group tpu pytest -m slow -k tpu")
    from jax.experimental import topologies

    os.environ.update(
        TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_ID="0",
        TPU_WORKER_HOSTNAMES="localhost",
    )  # fmt: skip
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(-1)[:1], ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return _lowered(total, shapes, everywhere, "tpu")


def _for_gpu(total, shapes):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip(
            "jax[cuda12] is not installed: uv run --with 'jax[cuda12]' pytest -m slow -k gpu"
        )
    from benchmarks.tpu.cases import make_mesh

    everywhere = jax.sharding.NamedSharding(make_mesh("h100"), jax.sharding.PartitionSpec())
    return _lowered(total, shapes, everywhere, "cuda")


def _lowered(total, shapes, sharding, platform):
    """Returns the program for the absent devices of a sharding."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    return jax.jit(total).trace(*shapes).lower(lowering_platforms=(platform,))


def _among(blocks, scope, operation):
    """Returns the instructions of a scope that perform one operation."""
    every = [x for block in blocks for x in block]
    return [x for x in every if scope in x.scope.split("/") and x.operation == operation]


@pytest.mark.parametrize(
    "lower",
    [_for_cpu, *(pytest.param(each, marks=pytest.mark.slow) for each in (_for_tpu, _for_gpu))],
)
@pytest.mark.parametrize("name", helpers.slow_but(("groups", "points"), PROGRAMS))
def test_compiled_program_keeps_operations_of_the_proof(name, lower):
    lowered = lower(*PROGRAMS[name]())
    written = computations(lowered.as_text("hlo", debug_info=True))
    compiled = computations(lowered.compile().as_text())

    # Numbers outside of the working range are replaced.
    for blocks in (written, compiled):
        assert _among(blocks, "within_range", "select")

    # Values that both norm and sum read are stored by a conditional. On TPU and GPU a barrier keeps
    # them from being computed again; it is removed after kernels are formed.
    if lower is _for_cpu:
        kept = [len(_among(blocks, "materialize", "conditional")) for blocks in (written, compiled)]
        assert kept[0] == kept[1] > 0
    else:
        assert _among(written, "materialize", "opt-barrier")
        assert not _among(written, "materialize", "conditional")

    # Sums over several axes are computed axis by axis.
    for block in compiled:
        shapes = {x.name: x.shape for x in block}
        for x in _among([block], "sum_by_axes", "reduce"):
            axes = map(int, re.search(r"dimensions=\{([\d,]+)\}", x.text)[1].split(","))
            assert sum(shapes[x.operands[0]][axis] > 1 for axis in axes) <= 1, x.text

    # An operation that the compiler keeps rounds factors to bfloat16.
    rounded = [
        [x for block in blocks for x in block if x.operation == "reduce-precision"]
        for blocks in (written, compiled)
    ]
    assert bool(rounded[0]) == bool(rounded[1]) == (name == "bfloat16")
    assert len(rounded[1]) <= len(rounded[0])  # no rounding is repeated


@pytest.mark.parametrize(
    ("lower", "loops"), [(_for_cpu, 1), pytest.param(_for_gpu, 0, marks=pytest.mark.slow)]
)
def test_large_results_of_blocks_are_added_in_turn_except_on_gpu(lower, loops):
    """A GPU would start the kernels of a block again for each block."""
    rows = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    compiled = computations(lower(_sum_of_products, (rows, rows)).compile().as_text())
    assert sum(x.operation == "while" for block in compiled for x in block) == loops


def _sum_of_products(x, y):
    return block_sums.sum_in_blocks(lambda x, y: x.T @ y, x, y)
