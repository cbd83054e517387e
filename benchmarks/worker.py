"""Runs one variant in JAX: `python -m benchmarks.worker REQUEST`."""

import time

import jax

from benchmarks.contenders import Setting, make_step, params_and_state
from benchmarks.models import MODELS
from benchmarks.networks import NETWORKS
from benchmarks.serve import serve
from benchmarks.third_party import problem as third_party_problem


def problem_named(name, options):
    """Returns a model of `benchmarks` or of `tests/models`."""
    ours = MODELS | NETWORKS
    return ours[name](**options) if name in ours else third_party_problem(name)


def build(request):
    """Returns the step, and facts on it, such as its compile seconds."""
    problem = problem_named(request["model"], request["options"])
    batch = jax.block_until_ready(problem.make_batch(request["batch_size"]))
    options = ("batch_size", "microbatch_size", "algorithm", "noise", "points")
    setting = Setting(*(request[name] for name in options))
    step, opt_state = make_step(request["library"], problem, setting)
    start = time.perf_counter()
    compiled = step.lower(problem.params, opt_state, batch).compile()
    compile_seconds = time.perf_counter() - start
    state = [problem.params, opt_state]

    def run():
        results = jax.block_until_ready(compiled(*state, batch))
        state[:] = params_and_state(results, request["algorithm"])

    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(problem.params)),
        "temporary_mb": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }
    return run, {"compile_seconds": compile_seconds, **facts}


if __name__ == "__main__":
    serve(build)
