"""Tests the cost of a private step for TPUs: passes of the matrix unit, and compiled programs."""

import dataclasses
import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.tpu import __main__ as command
from benchmarks.tpu import hlo
from benchmarks.tpu.architectures import gpt2, vit_s
from benchmarks.tpu.cases import CASES, Case, Options, make_mesh
from benchmarks.tpu.passes import passes, ratio

# Passes of the private step over those of the plain step.
LIMIT = 1.15
CASES_AND_SIZES = [
    ("gpt2", 8), ("gpt2-bfloat16", 8), ("gpt2-1024", 8), ("resnet-18", 32),
    ("resnet-18-bfloat16", 32), ("vit-s", 32), ("vit-s-bfloat16", 32),
]  # fmt: skip
SMALL = {
    "gpt2": Case(lambda: gpt2(128, layers=2, width=128, heads=2, vocabulary=5000), 16),
    "vit-s": Case(lambda: vit_s(layers=2, dtype="bfloat16"), 16),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), CASES_AND_SIZES, ids=str)
def test_private_step_takes_few_passes(name, size):
    case = dataclasses.replace(CASES[name], batch_size=size)
    # The default on TPU; here the default is that of a CPU.
    assert ratio(case, Options(precision="bfloat16")) <= LIMIT


def _matrix(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("precision", "dtype", "factor"),
    [
        (None, jnp.float32, 1),
        ("high", jnp.float32, 3),
        ("highest", jnp.float32, 6),
        ("highest", jnp.bfloat16, 1),
        (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, jnp.float32, 3),
    ],
    ids=str,
)
def test_passes_follow_dtype_and_precision(precision, dtype, factor):
    product = lambda x, y: jnp.matmul(x, y, precision=precision)  # noqa: E731
    found = passes(product, _matrix(2, 3, dtype=dtype), _matrix(3, 5, dtype=dtype))
    assert found == 2 * 2 * 3 * 5 * factor


def test_counts_loops_branches_and_unused_products():
    square = lambda x: x @ x  # noqa: E731
    cube = lambda x: x @ x @ x  # noqa: E731

    def function(x):
        cube(x)  # not used
        x, _ = lax.scan(lambda x, _: (square(x), None), x, length=5)
        return lax.cond(x[0, 0] > 0, cube, square, x)

    assert passes(function, _matrix(4, 4)) == (5 + 2) * 2 * 4**3
    loop = lambda x: lax.while_loop(lambda x: x[0, 0] > 0, square, x)  # noqa: E731
    with pytest.raises(ValueError, match="iterations are unknown"):
        passes(loop, _matrix(4, 4))


@pytest.mark.parametrize(("platform", "products"), [("tpu", 1), ("cpu", 2), ("cuda", 3)])
def test_counts_only_the_branch_of_the_platform(platform, products):
    def power(n):
        return lambda x: functools.reduce(jnp.matmul, [x] * (n + 1))

    def function(x):
        def loss(x):
            y = lax.platform_dependent(x, tpu=power(1), cpu=power(2), default=power(3))
            return jnp.sum(jnp.sin(y))

        return jax.vmap(loss)(x)

    assert passes(function, _matrix(7, 4, 4), platform=platform) == products * 7 * 2 * 4**3


def test_does_not_count_products_on_padding():
    def convolve(x, kernel):
        numbers = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, kernel, (2,), "SAME", dimension_numbers=numbers)

    found = passes(convolve, _matrix(2, 8, 3), _matrix(3, 3, 5))
    assert found == 2 * (2 * 3 * 5) * (4 * 3 - 1)  # the last window ends one place outside


HLO = """\
HloModule step

%fused (a: f32[8,4], b: s32[]) -> f32[4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %row = f32[1,4]{1,0} dynamic-slice(%a, %b, %b), dynamic_slice_sizes={1,4}
  ROOT %flat = f32[4]{0} bitcast(%row)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[]{:S(2)} get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %row.1 = f32[4]{0} fusion(%x, %i), kind=kLoop, calls=%fused
  %y = f32[8,8]{1,0:T(8,128)S(1)} dot(%x, %x), lhs_contracting_dims={1}, operand_precision={highest}
  %all = f32[8,4]{1,0} all-reduce(%x), to_apply=%add
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %all)
}

%condition (p.1: (s32[], f32[8,4])) -> pred[] {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(6)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.1: f32[8,4]) -> (s32[], f32[8,4]) {
  %x.1 = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[8,4]{1,0}) tuple(%zero, %x.1)
  ROOT %loop = (s32[], f32[8,4]{1,0:T(8,128)}) while(%first), condition=%condition, body=%body
}
"""


def test_counts_loops_slices_and_memory_of_compiled_programs():
    found = hlo.cost(HLO)
    assert found.passes == 6 * (2 * 8 * 8 * 4) * 6
    row, whole = 4 * 4, 8 * 4 * 4
    assert found.hbm_bytes == 6 * (2 * row + 2 * whole + 2 * whole)
    assert found.collectives == {"all-reduce*": (6, 6 * whole)}
    assert found.kernels == 6 * 3  # a slice, a product and a sum over chips


def test_command_lists_cases_and_rejects_others(capsys):
    command.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CASES)
    with pytest.raises(SystemExit):
        command.main(["gpt5"])
    assert "unknown cases: gpt5" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_compiled_passes_match_traced_passes(name, monkeypatch, tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: uv run --group tpu pytest -m slow -k tpu")
    monkeypatch.setitem(CASES, name, SMALL[name])
    lines, path = [], tmp_path / "numbers.json"
    command.main([name, "--no-noise", "--json", str(path)], show=lambda x, **_: lines.append(x))
    found = json.loads(path.read_text())["cases"][name]
    compiled = found["private"]["gflop"] / found["plain"]["gflop"]
    chips = make_mesh(SMALL[name].topology).size
    share = dataclasses.replace(SMALL[name], batch_size=SMALL[name].batch_size // chips)
    counted = Options(noise=False, precision="bfloat16")  # the default on TPU
    assert compiled == pytest.approx(ratio(share, counted), rel=0.02)
    assert found["private"]["hbm_gb"] > 0
    assert any(kind.startswith("all-reduce") for kind in found["private"]["collectives"])
    assert lines[-1].startswith("| | ratio |")
