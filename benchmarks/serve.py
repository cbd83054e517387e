"""Runs a step in a worker process on request.

Every variant has a separate process, and therefore separate memory and compilation. The processes
take turns. This module uses the standard library only, because the environment of Opacus and FastDP
has no JAX.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_STEPS = 50


def serve(build: Callable[[dict], tuple[Callable[[], Any], dict]]) -> None:
    """Answers requests on standard input, one line of JSON each, until it closes.

    `build(request)` returns the step and facts to report. The step blocks until its result is
    ready.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message):
        print(json.dumps(message), file=replies, flush=True)

    request = json.loads(sys.argv[1])
    limit = int(request["memory_limit_gb"] * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        step, facts = build(request)
        step()
        reply(facts)
        for line in sys.stdin:
            reply({"ms": _milliseconds(step, float(line)), "peak_mb": _peak_mb()})
    except Exception as error:  # The table reports errors of any library.
        lines = str(error).strip().splitlines() or [""]
        reply({"error": f"{type(error).__name__}: {lines[0][:200]}"})


def _milliseconds(step, seconds):
    """Times steps for `seconds`, at least one; drops the first of many as a warm-up."""
    times = []
    while not times or (sum(times) < 1e3 * seconds and len(times) < MAX_STEPS):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:] if len(times) > 3 else times


def _peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
