"""Runs one variant in JAX: `python -m benchmarks.worker REQUEST`."""

import time

import jax

import dpoptax
from benchmarks.contenders import Setting, make_step, params_and_state
from benchmarks.models import MODELS
from benchmarks.networks import NETWORKS
from benchmarks.serve import serve
from benchmarks.third_party import problem as third_party_problem
from benchmarks.variants import TUNED


def _candidates(library, batch_size):
    """Returns the sizes to tune over, without a whole batch that is its own variant.

    For dpoptax, `None` takes the default, which tries a part of the sizes that others get.
    """
    if library.startswith("dpoptax"):
        return None
    return [batch_size // 2**i for i in range(1, 9) if batch_size >= 2 ** (i + 1)] or [batch_size]


def problem_named(name, options):
    """Returns a model of `benchmarks` or of `tests/models`."""
    ours = MODELS | NETWORKS
    return ours[name](**options) if name in ours else third_party_problem(name)


def build(request):
    """Returns the step and its compile seconds, or the tuned micro-batch size only."""
    problem = problem_named(request["model"], request["options"])
    batch_size = request["batch_size"]
    batch = jax.block_until_ready(problem.make_batch(batch_size))

    def made(microbatch_size):
        rest = (request[name] for name in ("algorithm", "noise", "points"))
        return make_step(request["library"], problem, Setting(batch_size, microbatch_size, *rest))

    if request["microbatch_size"] == TUNED:
        _, opt_state = made(batch_size)
        best = dpoptax.tune_microbatch_size(
            lambda size: made(size)[0],
            problem.params,
            opt_state,
            batch,
            batch_size=batch_size,
            candidates=_candidates(request["library"], batch_size),
            rounds=4,
        )
        return None, {"microbatch_size": best}

    step, opt_state = made(request["microbatch_size"])
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
