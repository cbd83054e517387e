"""Writes prices, trained models and a figure on the released code."""

from pathlib import Path

from dpoptax.training.bars import Bar
from dpoptax.training.run.files import check_count, markdown_table
from experiments.figure_files import shrink
from experiments.released import decomposition, geodp_digits, tables, tuning
from experiments.released.noise import settings
from experiments.released.problems import PROBLEMS, TUNED
from experiments.released.tuned_tables import tuned_section
from experiments.run_once import append_lines, read_lines


def write_report(
    *,
    data_dir: Path | None = None,
    folder: Path = Path("experiments/results/released-code"),
    seeds: int = 5,
) -> str:
    """Measures and prices the papers' released update rules, and trains with them.

    Args:
        data_dir: Folder with MNIST and CIFAR-10. Without it, only the table of prices is printed.
        folder: Folder of the records. Finished work in it is not repeated. The page is next to it.
        seeds: Number of repetitions.
    """
    check_count("seeds", seeds)
    prices = _prices(folder / "prices.jsonl")
    if data_dir is None:
        return markdown_table(tables.PRICE_HEADER, prices)
    runs = {
        name: decomposition.compare(problem, data_dir, folder / f"{name}.jsonl", seeds=seeds)
        for name, problem in PROBLEMS.items()
    }
    tuned = {
        problem.title: tuning.tune(problem, data_dir, folder / f"{name}.jsonl", seeds=seeds)
        for name, problem in TUNED.items()
    }
    tuned["digits"] = tuning.read(folder / "normalized-digits.jsonl")
    text = tables.page(runs, prices, geodp_digits.rows(data_dir)) + tuned_section(tuned)
    page, figure = folder.with_suffix(".md"), folder / "parts.png"
    page.write_text(text, encoding="utf-8")
    tables.draw(tables.shown_in_figure(runs), figure)
    shrink(figure, figure)
    return f"Written to {page}"


def _prices(path: Path) -> list[list[str]]:
    """Returns the rows of the price table, and adds new ones to the file."""
    found = {row[0]: row for row in read_lines(path)}
    missing = [setting for setting in settings() if setting.name not in found]
    for setting in Bar(missing, unit="run", disable=not missing):
        found[setting.name] = list(tables.price_row(setting))
        append_lines(path, [found[setting.name]])
    return [found[setting.name] for setting in settings()]
