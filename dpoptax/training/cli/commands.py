"""Runs the commands of the command line and prints their results."""

import itertools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tyro

import dpoptax
from dpoptax.runs import to_decimals, to_digits
from dpoptax.training import hosts, named_configs
from dpoptax.training.cli.options import (
    AuditOptions,
    CompareArguments,
    NoOptions,
    PriceArguments,
    SuggestArguments,
    SweepArguments,
    TrainOptions,
    configs_by_name,
    parse,
    with_data,
)
from dpoptax.training.config import Config, load_config
from dpoptax.training.errors import ConfigError
from dpoptax.training.run.announcer import Announcer, say

# Each command imports its own modules, so that it starts quickly.


def _train(arguments: list[str]) -> int:
    from dpoptax.training.train_config import seed_of, train_and_evaluate

    path, config = _config_of("train", arguments)
    config, given = parse(
        config,
        TrainOptions,
        arguments[1:],
        prog=f"dpoptax train {path}",
        description=f"Train the config of {path}. Every argument of it is an option.",
    )
    mesh = hosts.start(given.parallel)  # first, because hosts must join before any use of JAX
    if seed_of(config) is not None and config.task().is_private:
        warnings.warn(
            "`seed` can be read in the config or the command, and the noise follows from it. Omit "
            "it to draw a key from the operating system.",
            stacklevel=2,
        )
    summary = train_and_evaluate(config, given.workdir, mesh=mesh, generator=given.generator)
    if summary["stopped_by_budget"]:
        print(
            f"Stopped by the budget: step {summary['steps'] + 1} of {summary['steps_requested']} "
            f"would exceed ε = {summary['budget']:g}."
        )
    spent = "without a proven guarantee" if summary["unproven"] else "not private"
    if summary["private"]:
        epsilon = to_decimals(summary["epsilon"])
        spent = f"({epsilon}, {to_digits(summary['delta'])})-differentially private"
        spent += " for each user" * (summary["unit"] == "user")
        if summary["assumed_secret"]:
            spent += " if the seed stays secret and no other run uses it"
    print(
        f"{summary['method']}: {_reached(summary)} after {summary['steps']} steps, {spent}; "
        f"written to {given.workdir}"
    )
    return 0


def _reached(summary: Mapping[str, Any]) -> str:
    """Returns the metrics of a summary: perplexity or accuracy, or else all."""
    if "test_perplexity" in summary:
        return f"test perplexity {summary['test_perplexity']:.2f}"
    if "test_accuracy" in summary:
        return f"test accuracy {100 * summary['test_accuracy']:.2f} %"
    found = ((name, value) for name, value in summary.items() if name.startswith("test_"))
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found)


def _configs(arguments: list[str]) -> int:
    if arguments:
        raise ConfigError(f"`dpoptax configs` takes no arguments, got {' '.join(arguments)}.")
    print(named_configs.listing())
    return 0


def _plan(arguments: list[str]) -> int:
    from dpoptax.training import planning

    paths, rest = _paths_first(arguments)
    if "--suggest" in rest:
        return _suggest(paths, [argument for argument in rest if argument != "--suggest"])
    if not paths:
        return _price(rest)
    configs = configs_by_name([Path(path) for path in paths])
    if len(configs) > 1:
        if rest:
            raise ConfigError(
                f"Options need one run, but {' '.join(paths)} names {len(configs)} runs. Pass "
                "FILE:NAME before the options."
            )
        table, refused = planning.table(configs, progress=True)
        print(table)
        if refused:
            raise ConfigError("\n".join(map(str, refused)))
        return 0
    (name, config), *_ = configs.items()
    config, _ = parse(
        config,
        NoOptions,
        rest,
        prog=f"dpoptax plan {paths[0]}",
        description=f"Compute the cost of {paths[0]}. Every argument of it is an option.",
    )
    with Announcer(say)("computing the cost of the run"):
        cost = planning.plan_run(config.task())
    print(planning.text(name, cost))
    return 0


def _price(options: list[str]) -> int:
    from dpoptax.training import planning

    plan = tyro.cli(
        PriceArguments,
        args=options,
        prog="dpoptax plan",
        description="Compute the noise, or ε, of a run from its numbers. `dpoptax plan CONFIG "
        "--help` and `dpoptax plan --suggest --help` list other options.",
    ).plan()
    print(plan)
    print(f"  attacks  {planning.attacks_text(plan.guarantee())}")
    return 0


def _suggest(paths: list[str], options: list[str]) -> int:
    from dpoptax.training import planning

    known: dict[str, Any] = {}
    if paths:
        task = _config_of("plan --suggest", paths)[1].task()
        plan, planned = task.plan, task.guarantee()
        known = {
            "dataset_size": plan.sampler.dataset_size,
            # Calibration stays below the target by at most a thousandth.
            "epsilon": None if planned is None else float(f"{planned.stated_epsilon:.3g}"),
            "delta": None if planned is None else planned.stated_delta,
            "examples": plan.sampler.batch_size * plan.steps,
        }
    needed = dict.fromkeys(("dataset_size", "epsilon", "delta"), tyro.MISSING)
    known = needed | {name: value for name, value in known.items() if value is not None}
    given = tyro.cli(
        SuggestArguments,
        default=SuggestArguments(**known),
        args=options,
        prog="dpoptax plan --suggest",
        description="Suggest batch size, steps and noise for a compute budget.",
    )
    examples = given.examples
    if given.flops is not None:
        if not paths:
            raise ConfigError("`--flops` needs a config, whose operations for an example count.")
        cost = (planning.plan_run(task).flops or 0.0) / plan.sampler.padded_size
        examples = given.flops / cost
    if examples is None:
        raise ConfigError(
            "`dpoptax plan --suggest` needs a compute budget. Pass --examples or --flops."
        )
    suggestion = dpoptax.accounting.suggest_plan(
        dataset_size=given.dataset_size, epsilon=given.epsilon, delta=given.delta, examples=examples
    )
    print(suggestion)
    print("This is for Poisson sampling. `dpoptax plan` says if balls_in_bins needs less noise.")
    return 0


def _compare(arguments: list[str]) -> int:
    given = tyro.cli(
        CompareArguments,
        args=arguments,
        prog="dpoptax compare",
        description="Train several configs at one ε and compare them: a table and a figure.",
    )
    from dpoptax.training.search.compare import compare, table  # help must not load the accounting

    configs = with_data(configs_by_name(given.configs), given)
    print(table(compare(configs, given.comparison)))
    print(f"\nWritten to {given.comparison.workdir}: results.json, table.md, comparison.png, .pdf")
    return 0


def _sweep(arguments: list[str]) -> int:
    given = tyro.cli(
        SweepArguments,
        args=arguments,
        prog="dpoptax sweep",
        description="Train many settings of configs. The ε of the best covers the choice.",
    )
    from dpoptax.training.search import sweep  # help must not load the accounting

    configs, chosen = with_data(configs_by_name(given.configs), given), given.sweep
    if given.dry_run:
        print("\n".join(sweep.dry_run(configs, chosen)))
        return 0
    results = sweep.run_sweep(configs, chosen)
    if chosen.repetitions == "fixed":
        print(sweep.table(results))
    else:  # the table must stay secret, and output is often kept
        print("\n".join(results.notes))
        print(f"{chosen.workdir / 'trials.md'} lists all trials. Keep it secret.")
    if results.result is None:
        print("No trial was drawn, so there is no result.")
    else:
        print(f"\nbest: {_reached(results.result)}; written to {chosen.workdir / 'best'}")
    return 0


def _audit(arguments: list[str]) -> int:
    try:
        from dpoptax.training import task_audit
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`dpoptax audit` needs {error.name}, which is not installed. Run: pip install "
            "'dpoptax[audit,train]'"
        ) from error
    paths, options = _paths_first(arguments)
    jobs = [
        parse(
            load_config(path),
            AuditOptions,
            options,
            prog=f"dpoptax audit {path}",
            description=f"Audit the training of {path}. Every argument of it is an option.",
        )
        for path in paths or [_config_of("audit", arguments)[0]]
    ]
    tasks = [config.task() for config, _ in jobs]
    given = jobs[0][1]
    rows = [
        row
        for task in tasks
        for row in task_audit.audit_task(
            task, trials=given.trials, confidence=given.confidence, progress=True
        )
    ]
    print(task_audit.table(rows))
    confidence, delta = 100 * given.confidence, rows[0].result.delta
    print(f"\nEach bound alone holds with {confidence:g} % confidence, at δ = {delta:g}.")
    print("\n".join(task_audit.notes(rows)))
    return 1 if any(row.violated for row in rows) else 0


def _paths_first(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into those before the first option and the rest."""
    paths = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    return paths, arguments[len(paths) :]


def _config_of(command: str, arguments: list[str]) -> tuple[str, Config]:
    path = arguments[0]
    if path.startswith("-"):
        raise ConfigError(
            f"The first argument of `dpoptax {command}` must be the path of a config, got "
            f"{path!r}. Put options after the path."
        )
    paths, _ = _paths_first(arguments)
    if len(paths) > 1:
        raise ConfigError(
            f"`dpoptax {command}` takes one config, got {len(paths)}: {', '.join(paths)}. Use "
            "`dpoptax compare` to train several configs."
        )
    return path, load_config(path)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "configs": _configs,
    "plan": _plan,
    "compare": _compare,
    "sweep": _sweep,
    "audit": _audit,
}
"""The commands by name. Each takes the remaining arguments and returns the exit code."""
