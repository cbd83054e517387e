"""Prints tables of results for a page: `python -m benchmarks.gpu.tables results.json…`."""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.correctness import MODES
from dpoptax.training.run.files import markdown_table

# Columns of the table of correctness, by the mode of an attack.
_MOVE = "largest move / C"
_RATIOS = ("time ratio", "memory ratio")


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables of one or more runs; later results of a case replace earlier ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tables", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    for table in tables([json.loads(path.read_text()) for path in given.results]):
        print(table, end="\n\n")


def tables(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the tables of attacks, of other checks, and of steps in Markdown."""
    checks = _merged(runs, "correctness")
    steps = _merged(runs, "steps") | _merged(runs, "torch")
    return [_attacks(checks), _other_checks(checks), _steps(steps)]


def _merged(runs: Iterable[dict[str, Any]], section: str) -> dict[str, Any]:
    """Returns the cases of a section that were not skipped."""
    found: dict[str, Any] = {}
    for run in runs:
        for name, result in run.get(section, {}).items():
            if "skipped" not in result:
                found[name] = {_named(key, run): x for key, x in result.items()}
    return found


def _named(contender: str, run: dict[str, Any]) -> str:
    """Returns the name of a contender with its precision."""
    precision = run["about"].get("default precision", "float32")
    return contender.replace("dpoptax auto", f"dpoptax {precision}")


def _attacks(checks: dict[str, Any]) -> str:
    """Returns a row for each mode: programs, passed, and the largest move."""
    rows = []
    for mode in MODES:
        found = {
            name.removesuffix(f", {mode}"): result
            for name, result in checks.items()
            if name.endswith(f", {mode}")
        }
        if found:
            moves = [result[_MOVE] for result in found.values() if _MOVE in result]
            failed = [name for name, result in found.items() if not result.get("passed")]
            largest = f"{max(moves):.6f}" if moves else ""
            rows.append([mode, len(found), len(found) - len(failed), largest, ", ".join(failed)])
    return _table(["products", "programs", "passed", "largest move / C", "not passed"], rows)


def _other_checks(checks: dict[str, Any]) -> str:
    rows = []
    for name, result in checks.items():
        if not name.endswith(tuple(f", {mode}" for mode in MODES)):
            facts = [f"{key} {_short(x)}" for key, x in result.items() if key != "passed"]
            rows.append([name, "yes" if result.get("passed") else "no", "; ".join(facts)])
    return _table(["check", "passed", "numbers"], rows)


def _steps(steps: dict[str, Any]) -> str:
    rows = []
    for name, contenders in steps.items():
        if "error" in contenders:
            rows.append([name, contenders["error"], *4 * [""]])
            continue
        for contender, x in contenders.items():
            if "ms" not in x:
                rows.append([name, contender, x["error"], *3 * [""]])
                continue
            ratios = [f"{x[key]:.2f}" if key in x else "" for key in _RATIOS]
            rows.append([name, contender, _short(x["ms"]), *ratios, f"{x['compile s']:.0f}"])
            name = ""
    return _table(["network", "step", "ms", *_RATIOS, "compile, s"], rows)


def _short(x: Any) -> str:
    if not isinstance(x, float):
        return str(x)
    return f"{x:.3g}" if x < 100 else f"{x:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return markdown_table(header, [[str(x) for x in row] for row in rows])


if __name__ == "__main__":
    main()
