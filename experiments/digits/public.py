"""Measures ways to use a few public examples, at equal ε and tuning."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.training.bars import Bar
from dpoptax.training.run.files import markdown_table
from experiments.digits.arms import (
    Arm,
    Columns,
    Params,
    Settings,
    Split,
    loss_fn,
    measure,
    split_digits,
)

EPSILON, DELTA = 1.0, 1e-5
BATCH_SIZE, STEPS, PUBLIC_STEPS = 256, 100, 300
_RATES, _SHARES = (0.03, 10.0), (0.03, 1.0)


def _gradient(params: Params, public: Columns) -> Params:
    gradient: Params = jax.grad(loss_fn)(params, public)
    return gradient


def added(public: Columns, share: Any) -> optax.GradientTransformation:
    """Mixes each released gradient with the gradient of the mean public loss."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u, p: (1 - share) * u + share * p, updates, _gradient(params, public)
        )
    )


def alternated(public: Columns, rate: Any) -> optax.GradientTransformation:
    """Takes a step along the public gradient after each private step."""

    def update(updates: Params, params: Params | None) -> Params:
        assert params is not None
        moved = optax.apply_updates(params, updates)
        return jax.tree.map(lambda u, p: u - rate * p, updates, _gradient(moved, public))

    return optax.stateless(update)


def pretrained(public: Columns, steps: int) -> Callable[[Params, Settings], Params]:
    """Returns a start that trains on the public examples."""

    def start(params: Params, settings: Settings) -> Params:
        def step(_: Any, params: Params) -> Params:
            moves = _gradient(params, public)
            return jax.tree.map(lambda p, g: p - settings["public_rate"] * g, params, moves)

        return jax.lax.fori_loop(0, steps, step, params)

    return start


def public_arms(split: Split) -> dict[str, Arm]:
    """Returns the compared ways. Those with private steps spend the same ε."""
    public = jax.tree.map(jnp.asarray, split.public)
    plan = dpoptax.PrivacyPlan(
        dataset_size=len(split.private[1]),
        batch_size=BATCH_SIZE,
        steps=STEPS,
        epsilon=EPSILON,
        delta=DELTA,
    )
    start = pretrained(public, PUBLIC_STEPS)
    rate, public_rate, share = ({"rate": _RATES}, {"public_rate": _RATES}, {"share": _SHARES})

    def sgd(settings: Settings) -> optax.GradientTransformation:
        return optax.sgd(settings["rate"])

    def mixing(settings: Settings) -> optax.GradientTransformation:
        return optax.chain(added(public, settings["share"]), sgd(settings))

    def alternating(settings: Settings) -> optax.GradientTransformation:
        return optax.chain(sgd(settings), alternated(public, settings["public_rate"]))

    return {
        "private only": Arm(rate, plan, sgd),
        "public only": Arm(public_rate, None, lambda _: optax.identity(), start),
        "public gradient added": Arm(rate | share, plan, mixing),
        "alternated": Arm(rate | public_rate, plan, alternating),
        "pretrained": Arm(rate | public_rate, plan, sgd, start),
        "pretrained and added": Arm(rate | public_rate | share, plan, mixing, start),
    }


def public_page(*, trials: int = 16, seeds: int = 10, sizes: tuple[int, ...] = (50, 200)) -> str:
    """Trains all arms with public examples of the same and of another source."""
    columns: dict[str, dict[str, str]] = {}
    splits = {}
    for size in sizes:
        split = split_digits(size)
        inputs, labels = split.public
        moved = np.roll(inputs.reshape(-1, 8, 8), 1, axis=2).reshape(-1, 64)
        splits[f"{size} public"] = split
        splits[f"{size} public, moved by a pixel"] = split._replace(public=(moved, labels))
    for name, split in Bar(splits.items(), "public", unit="set"):
        columns[name] = {
            arm: str(measure(each, split, trials=trials, seeds=seeds))
            for arm, each in public_arms(split).items()
        }
    names = list(next(iter(columns.values())))
    rows = [(arm, *(column[arm] for column in columns.values())) for arm in names]
    return (
        "# Public and private digits in one training\n\n"
        f"A network with 64 hidden units. The other {1297 - sizes[0]:,} or {1297 - sizes[-1]:,} "
        f"training examples are private: {STEPS} steps of DP-SGD at ε = {EPSILON:g}, δ = "
        f"{DELTA:g}, B = {BATCH_SIZE}, C = 1, the same for every row with private data. Each row "
        f"and column has {trials} settings of its learning rates and shares, chosen by validation "
        f"accuracy. Test accuracies are means and standard deviations over {seeds} other seeds.\n\n"
        + markdown_table(("training", *columns), rows)
        + "\n"
    )
