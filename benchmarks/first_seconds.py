"""Times the first seconds of a user: the README's loop, a second `fit`, and evaluations.

`python -m benchmarks first-seconds` runs each in a separate process, without a compilation cache.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PHASES = ("import", "plan", "first step", "other steps", "guarantee")
_FITS = ("import", "first fit", "second fit", "third fit")
_RUNS = ("import", "training")


@dataclass
class FirstSeconds:
    """Times the README's loop, a second `fit` in a process, and evaluations in a run."""

    rounds: int = 3
    """Processes for each; the least time of each phase counts."""


@dataclass
class Clock:
    """Sums the seconds of each phase of this process.

    Attributes:
      wall: wall time by phase.
      processor: processor time of all threads by phase.
    """

    wall: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    _since: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Starts the first phase."""
        self._since = time.perf_counter(), time.process_time()

    def mark(self, phase: str) -> None:
        """Ends a phase, and starts the next."""
        now = time.perf_counter(), time.process_time()
        for kept, begun, ended in zip((self.wall, self.processor), self._since, now, strict=True):
            kept[phase] = kept.get(phase, 0.0) + ended - begun
        self._since = now


def readme_program() -> str:
    """Returns the README's loop with a mark after each phase."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    lines = []
    for line in text.split("```python\n")[1].split("```")[0].splitlines():
        lines.append(line)
        if line.startswith("import "):
            lines.append('mark("import")')
        elif line.startswith("plan = "):
            lines.append('mark("plan")')
        elif line.startswith("    params, opt_state = step("):
            lines.append("    jax.block_until_ready(params)")
            lines.append('    mark("other steps" if batch.step else "first step")')
    return "\n".join([*lines, 'mark("guarantee")'])


def run_readme(clock: Clock) -> None:
    """Runs the README's loop."""
    exec(readme_program(), {"mark": clock.mark})


def run_fits(clock: Clock) -> None:
    """Calls `fit` three times with one loss and optimizer, and three seeds."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dpoptax
    from dpoptax.training import fit

    clock.mark("import")
    data = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)

    def loss_fn(params: jnp.ndarray, example: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum((params - example) ** 2)

    optimizer = optax.sgd(0.1)
    for phase in _FITS[1:]:
        plan = dpoptax.PrivacyPlan(
            dataset_size=2000, batch_size=200, steps=20, epsilon=3, delta=1e-5
        )
        fit(loss_fn, jnp.zeros(8), data, plan, optimizer=optimizer, progress=False)
        clock.mark(phase)


def run_training(clock: Clock, eval_every: int) -> None:
    """Trains 400 steps on digits, with an evaluation every `eval_every` steps."""
    import tempfile

    from dpoptax.training import Task, config_of, load_config, train_and_evaluate

    clock.mark("import")

    def digits() -> Task:
        return replace(load_config("digits").task(steps=400), eval_every=eval_every)

    with tempfile.TemporaryDirectory() as folder:
        train_and_evaluate(config_of(digits), folder, progress=False)
    clock.mark("training")


PROGRAMS: dict[str, tuple[Callable[[Clock], None], tuple[str, ...]]] = {
    "README's loop": (run_readme, _PHASES),
    "`fit`, three times": (run_fits, _FITS),
    "400 steps on digits": (functools.partial(run_training, eval_every=400), _RUNS),
    "the same, 40 evaluations": (functools.partial(run_training, eval_every=10), _RUNS),
}
"""What is timed, and its phases."""


def main(options: FirstSeconds) -> str:
    """Runs all programs, and returns a table for each."""
    from dpoptax.training.run.files import markdown_table

    tables = []
    for name, (_, phases) in PROGRAMS.items():
        turns = [_in_process(name) for _ in range(options.rounds)]
        least = {
            kind: {phase: min(getattr(turn, kind)[phase] for turn in turns) for phase in phases}
            for kind in ("wall", "processor")
        }
        rows = [
            [kind, *(f"{seconds:.2f}" for seconds in times.values()), f"{sum(times.values()):.2f}"]
            for kind, times in least.items()
        ]
        tables.append(markdown_table([f"{name}, s", *phases, "sum"], rows))
    return "\n\n".join(tables)


def _in_process(name: str) -> Clock:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_seconds", name],
        check=True, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wall, processor = json.loads(done.stdout.splitlines()[-1])
    return Clock(wall, processor)


if __name__ == "__main__":
    clock = Clock()
    clock.start()
    PROGRAMS[sys.argv[1]][0](clock)
    print(json.dumps([clock.wall, clock.processor]))
