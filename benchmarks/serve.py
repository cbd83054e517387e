"""The worker's side of a measurement: build a step, then run it whenever asked.

Every variant lives in a process of its own, so that memory and compilation are its own, and the
processes take turns. Needs the standard library only, since Opacus and FastDP live elsewhere.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MAX_STEPS = 50


def serve(build: Callable[[dict], tuple[Callable[[], Any] | None, dict]]) -> None:
    """Answers requests on standard input, a line of JSON each, until it closes.

    `build(request)` returns the step, which blocks until its result is there, and facts to report;
    no step where the facts are all that was asked for.
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
        if step is None:
            return reply(facts)
        step()
        reply(facts)
        for line in sys.stdin:
            reply({"ms": _milliseconds(step, float(line)), "peak_mb": _peak_mb()})
    except Exception as error:  # Whatever a peer raises is reported in the table.
        lines = str(error).strip().splitlines() or [""]
        reply({"error": f"{type(error).__name__}: {lines[0][:200]}"})


def _milliseconds(step, seconds):
    """Times steps for `seconds`, at least one; the first of many warms the caches."""
    times = []
    while not times or (sum(times) < 1e3 * seconds and len(times) < MAX_STEPS):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:] if len(times) > 3 else times


def _peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
