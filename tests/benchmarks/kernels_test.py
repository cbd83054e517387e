"""Counts the kernels of small networks, whose time is that of starting and compiling kernels."""

import importlib.util
import os
import re

import jax
import pytest

from benchmarks.tpu import cases, hlo

# The most fusions of the private step for a CPU, and kernels for an H100, over those of the plain
# step, with bfloat16 factors.
MOST = {"mlp": (3.05, 2.4), "cnn": (2.33, 1.75), "transformer": (2.4, 1.12)}


def _compiled(name, step, topology):
    case, mesh = cases.CASES[name], cases.make_mesh(topology)
    model = case.model()
    if step == "plain":
        function, state = cases.plain_step(case, model)
    else:
        options = cases.Options(precision="bfloat16", microbatch_size=case.batch_size)
        function, state = cases.private_step(case, model, options, mesh)
    arguments = cases.place(case, model, state, mesh)
    platform = "cpu" if topology == "cpu" else "cuda"
    traced = jax.jit(function, donate_argnums=(0, 1)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compile().as_text()


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_private_step_has_few_fusions_on_cpu(name):
    plain, private = (
        len(re.findall(r" fusion\(", _compiled(name, step, "cpu"))) for step in ("plain", "private")
    )
    print(f"{name}: {plain} and {private} fusions")
    assert private <= MOST[name][0] * plain


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_private_step_has_few_kernels_for_gpu(name):
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs `uv run --with 'jax[cuda12]'`")
    if "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ:
        pytest.skip("needs JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before JAX starts")
    plain, private = (
        hlo.cost(_compiled(name, step, "h100")).kernels for step in ("plain", "private")
    )
    print(f"{name}: {plain} and {private} kernels")
    assert private <= MOST[name][1] * plain
