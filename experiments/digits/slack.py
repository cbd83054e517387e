"""Measures clipping bounds that need no search, at equal ε and with equal tuning.

`SlackClip` is SlaClip (Zou et al., 2026) with other coordinates; its proof is in
docs/developers/methods.md.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import dpoptax
from dpoptax._gradients.clip.clip_per_example import clip_each
from dpoptax._release.adaptive import CountedGradient, QuantileClip
from dpoptax._support.tree import PyTree
from dpoptax.training.bars import Bar
from dpoptax.training.run.records import markdown_table
from experiments.data.images import load_mnist
from experiments.digits.arms import Arm, Result, Split, measure, split_digits

DELTA = 1e-5
BOUNDS, STARTS = (0.1, 1.0, 10.0), (0.03, 1.0, 30.0)
# Rates of a step of length one, and thresholds of a norm as shares of the bound.
_RATES = (2.0**-5, 2.0**6)
_LOW, _HIGH = 0.125, 0.75


@dataclasses.dataclass(frozen=True)
class SlackClip(QuantileClip):
    """Encodes a clipped gradient, with two counts of norms in the slack of the bound.

        u(g) = (min(1, C/‖g‖) g/C,  a_1 1[‖g‖ ≤ t_1 C],  a_2 1[‖g‖ ≤ t_2 C])
        a_1² = t_2² − t_1²,  a_2² = 1 − t_2²

    The next bound is C exp(η((1 + s_1)/2 − s_2)), with s_k the released shares: the share s_2 is
    moved to one half of the examples whose gradient is not near zero.
    """

    by_norms: ClassVar[bool] = False

    def encode(self, grads: PyTree, reference: PyTree) -> CountedGradient:
        """Returns each example's encoding, NaN if its gradient is not finite."""
        clipped = clip_each(self.scaling(reference), grads)
        gradient = [
            unit * coefficient.reshape((-1,) + (1,) * (unit.ndim - 1))
            for unit, coefficient in zip(clipped.units, clipped.coefficients, strict=True)
        ]
        below = clipped.norms[:, None] <= jnp.array([_LOW, _HIGH]) * reference
        count = jnp.where(clipped.used[:, None], amplitudes() * below, jnp.nan)
        return CountedGradient(jax.tree.unflatten(jax.tree.structure(grads), gradient), count)

    def next_threshold(self, mean: CountedGradient, threshold: jax.Array) -> jax.Array:
        """Returns the bound of the next step."""
        low, high = mean.count / amplitudes()
        target = (1 + jnp.clip(low, 0.0, 1.0)) / 2
        return jnp.clip(threshold * jnp.exp(self.learning_rate * (target - high)), 1e-9, 1e9)


def slack_sum(
    clip: SlackClip, points: dpoptax.GradientPoints, rows: tuple[jax.Array, ...], mask: jax.Array
) -> dpoptax.ClippedSum:
    """Returns the sum of `clipped_grad(loss_fn, clip)`, without per-example gradients.

    It is for larger batches. The gradient of a layer is an outer product, so its norm is a product.
    """
    (params,), bound, (inputs, labels) = points.points, points.reference, rows
    hidden = jnp.tanh(inputs @ params["hidden"] + params["hidden_bias"])
    errors = jax.nn.softmax(hidden @ params["head"] + params["head_bias"])
    errors -= jax.nn.one_hot(labels, errors.shape[1])
    before = errors @ params["head"].T * (1 - jnp.square(hidden))
    layers = {"hidden": (inputs, before), "head": (hidden, errors)}
    squares = [(1 + jnp.sum(x**2, axis=1)) * jnp.sum(y**2, axis=1) for x, y in layers.values()]
    norms = jnp.sqrt(squares[0] + squares[1])
    weights = jnp.where(mask, jnp.minimum(1 / bound, 1 / norms), 0.0)
    total = {}
    for name, (x, y) in layers.items():
        total[name] = x.T @ (weights[:, None] * y)
        total[f"{name}_bias"] = weights @ y
    below = (norms[:, None] <= jnp.array([_LOW, _HIGH]) * bound) & mask[:, None]
    counted = CountedGradient(total, jnp.sum(amplitudes() * below, axis=0))
    return dpoptax.extend.trust_clipped(counted, clip, bound, examples=len(mask))


def amplitudes() -> jax.Array:
    """Returns the coordinates of an example below both thresholds, (2,)."""
    return jnp.sqrt(jnp.array([_HIGH**2 - _LOW**2, 1 - _HIGH**2]))


def slack_clip(start: float, learning_rate: float = 0.5) -> SlackClip:
    """Returns the clip with an initial bound and the rate η of its logarithm."""
    return SlackClip(start, 0.5, learning_rate, count_share=0.0)


def clips() -> dict[str, tuple[dpoptax.Clip, float]]:
    """Returns the compared clips by name, with the length of a clipped gradient."""
    found: dict[str, tuple[dpoptax.Clip, float]] = {
        f"fixed, C = {bound:g}": (dpoptax.l2_clip(bound), bound) for bound in BOUNDS
    }
    found["automatic"] = (dpoptax.automatic_clip(1.0), 1.0)
    for start in STARTS:
        found[f"adaptive, C_0 = {start:g}"] = (dpoptax.contrib.adaptive_clip(start), 1.0)
    for start in STARTS:
        found[f"slack, C_0 = {start:g}"] = (slack_clip(start), 1.0)
    return found


def slack_page(*, trials: int = 10, seeds: int = 10, data_dir: Path | None = None) -> str:
    """Trains each clip on digits at two ε, or on MNIST in a folder, and returns tables."""
    if data_dir is None:
        digits = split_digits()
        pages = [_section("Digits", digits, 256, 120, e, trials, seeds) for e in (1.0, 3.0)]
    else:
        mnist = split_mnist(data_dir)
        pages = [_section("MNIST, 14 × 14 pixels", mnist, 600, 150, 1.0, trials, seeds)]
    return (
        "# Clipping bounds without a search\n\n"
        f"A network with 64 hidden units. Each row has {trials} learning rates, chosen by "
        f"validation accuracy on 3 seeds. Accuracies are means and standard deviations over "
        f"{seeds} other seeds, differences from `automatic_clip(1.0)` have 95 % intervals over "
        "equal seeds. `SlackClip` is in `experiments/digits/slack.py`.\n\n" + "\n".join(pages)
    )


def split_mnist(data_dir: Path) -> Split:
    """Returns MNIST with means of 2 × 2 pixels, and 5,000 training images for validation."""
    data = load_mnist(data_dir, "mnist", ("mnist", "MNIST/raw"))
    columns = []
    for part in (data.train, data.test):
        images = np.asarray(part["inputs"]).reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4))
        columns.append((images.reshape(-1, 196), np.asarray(part["labels"], np.int32)))
    (inputs, labels), test = columns
    public, private, validation = (
        (inputs[part], labels[part]) for part in map(slice, (0, 0, 55_000), (0, 55_000, None))
    )
    return Split(public, private, validation, test)


def _section(
    title: str, split: Split, batch: int, steps: int, epsilon: float, trials: int, seeds: int
) -> str:
    size = len(split.private[1])
    plan = dpoptax.PrivacyPlan(
        dataset_size=size, batch_size=batch, steps=steps, epsilon=epsilon, delta=DELTA
    )
    results = {}
    for name, (clip, length) in Bar(list(clips().items()), title, unit="clip"):
        low, high = (rate / length for rate in _RATES)
        grad_fn = functools.partial(slack_sum, clip) if isinstance(clip, SlackClip) else None
        arm = Arm(
            {"rate": (low, high)},
            plan,
            lambda s: optax.sgd(s["rate"]),
            clip=clip,
            grad_fn=grad_fn if batch > 256 else None,
        )
        results[name] = measure(arm, split, trials=trials, seeds=seeds)
    heads = ("clip", "learning rate", "test accuracy", "difference")
    setting = f"N = {size:,}, B = {batch}, {steps} steps, ε = {epsilon:g}, δ = {DELTA:g}"
    return f"## {title}, ε = {epsilon:g}\n\n{setting}.\n\n{markdown_table(heads, _rows(results))}\n"


def _rows(results: Mapping[str, Result]) -> list[tuple[str, ...]]:
    base = results["automatic"].accuracies
    rows: list[tuple[str, ...]] = []
    for name, result in results.items():
        gap = result.accuracies - base
        spread = stats.t.ppf(0.975, len(gap) - 1) * gap.std(ddof=1) / math.sqrt(len(gap))
        difference = "" if name == "automatic" else f"{gap.mean():+.2f} ± {spread:.2f}"
        rows.append((name, f"{result.settings['rate']:.2g}", str(result), difference))
    return rows
