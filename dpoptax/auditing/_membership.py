"""Membership attacks on a finished model, by thresholds on its losses."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from dpoptax._pricing.trade_off_functions import TradeOff
from dpoptax._support.rounded import to_decimals
from dpoptax.accounting import Guarantee
from dpoptax.auditing._error_curves import Array, TradeOffCurve, curve_of_counts


@dataclasses.dataclass(frozen=True)
class MembershipReport:
    """Holds the result of `membership_report`, an attack on a finished model.

    Attributes:
      losses_in: losses of the examples in the training data, sorted.
      losses_out: losses of the examples outside of it, sorted.
      false_positive_rates: (rates,), the largest fractions of `losses_out` guessed "in".
      errors: the attack's error rates at these rates, with limits that all hold together.
      claimed: the trade-off function of the guarantee; None without a guarantee.
    """

    losses_in: Array = dataclasses.field(repr=False)
    losses_out: Array = dataclasses.field(repr=False)
    false_positive_rates: Array
    errors: TradeOffCurve
    claimed: TradeOff | None

    @property
    def true_positive_rates(self) -> Array:
        """The fractions of `losses_in` guessed "in", (rates,)."""
        return 1 - self.errors.false_negative_rates

    @property
    def true_positive_bounds(self) -> Array:
        """Lower and upper limits of the true-positive rates, (2, rates)."""
        return 1 - self.errors.false_negative_bounds[::-1]

    @functools.cached_property
    def claimed_bounds(self) -> Array | None:
        """The largest true-positive rates under the guarantee, (rates,), or `None`."""
        return None if self.claimed is None else 1 - self.claimed(self.false_positive_rates)

    @functools.cached_property
    def refuted(self) -> bool:
        """True if the lower limit of a true-positive rate exceeds the guarantee's bound."""
        return self.claimed is not None and self.errors.refutes(self.claimed)

    @functools.cached_property
    def auc(self) -> float:
        """The probability that an included example has the smaller loss; ties count half."""
        found = stats.mannwhitneyu(-self.losses_in, -self.losses_out)
        return float(found.statistic / (len(self.losses_in) * len(self.losses_out)))

    def roc(self) -> tuple[Array, Array]:
        """Returns the false-positive and true-positive rates at all thresholds.

        Both have shape (thresholds,) and ascend from 0 to 1.
        """
        thresholds = np.unique(np.concatenate([self.losses_in, self.losses_out]))
        found = [
            np.searchsorted(losses, thresholds, side="right") / len(losses)
            for losses in (self.losses_out, self.losses_in)
        ]
        false, true = (np.concatenate([[0.0], rates]) for rates in found)
        return false, true

    def plot(self, path: str | Path) -> None:
        """Writes a log-log figure of the attack's ROC and the guarantee's bound.

        Raises:
          ImportError: matplotlib, a dependency of `dpoptax[train]`, is not installed.
        """
        least = min(self.false_positive_rates.min(), 1 / len(self.losses_out)) / 2
        rates = np.geomspace(least, 1, 400)
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ImportError(
                f"`plot` needs {error.name}, which is not installed. Run "
                "`pip install 'dpoptax[train]'`."
            ) from error
        figure = Figure(layout="constrained", figsize=(4.6, 4.2))
        axes = figure.subplots()
        if self.claimed is not None:
            most = np.maximum(1 - self.claimed(rates), rates)
            axes.plot(rates, most, color="#D55E00", label="bound of the guarantee")
            axes.fill_between(rates, most, 1, color="#D55E00", alpha=0.12, linewidth=0)
        axes.plot(rates, rates, color="#666666", linestyle="--", linewidth=1, label="guessing")
        false, true = self.roc()
        axes.step(false, true, where="post", color="#0072B2", label=f"attack, AUC {self.auc:.3f}")
        rates_found, limits = self.true_positive_rates, self.true_positive_bounds
        axes.errorbar(
            self.false_positive_rates,
            rates_found,
            yerr=np.abs(limits - rates_found),
            color="#0072B2",
            fmt="o",
            markersize=4,
            capsize=3,
        )
        axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small", loc="lower right")
        figure.savefig(path, dpi=200)

    def __str__(self) -> str:
        confidence = 100 * self.errors.confidence
        limits, bounds = self.true_positive_bounds, self.claimed_bounds
        rows = [("FPR", "TPR", "limits of TPR", "bound")]
        for i, rate in enumerate(self.false_positive_rates):
            bound = "none" if bounds is None else f"{to_decimals(100 * bounds[i], 2)} %"
            between = f"{_percent(limits[0, i])} to {_percent(limits[1, i])}"
            rows.append(
                (f"{100 * rate:g} %", _percent(self.true_positive_rates[i]), between, bound)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        verdict = "no guarantee was given"
        if self.claimed is not None:
            verdict = "the guarantee is REFUTED" if self.refuted else "the guarantee is not refuted"
        return "\n".join(
            [
                f"Membership by loss: {len(self.losses_in):,} examples in, "
                f"{len(self.losses_out):,} out, AUC {self.auc:.3f}",
                *table,
                f"With {confidence:g} % confidence for independent examples, {verdict}.",
                "A weak attack proves nothing.",
            ]
        )


def membership_report(
    losses_in: ArrayLike,
    losses_out: ArrayLike,
    *,
    guarantee: Guarantee | TradeOff | None = None,
    false_positive_rates: Sequence[float] = (0.001, 0.01),
    confidence: float = 0.95,
) -> MembershipReport:
    """Reports how well the losses of a finished model tell members from non-members.

        guess "in" if the loss is below the k-th smallest of `losses_out`,   k = ⌊α n⌋ + 1

    has a false-positive rate of at most α on the n examples outside. Its true-positive rate is
    compared with the greatest one under the guarantee, 1 − f(α) for the trade-off function f.

    This tests one attack on one model, and its conclusion is one-sided. If the lower limit of a
    true-positive rate is above the bound, the guarantee is refuted. A rate below the bound proves
    nothing: other attacks may be stronger. Losses are weak scores, and `audit` has stronger
    adversaries. Scores of any attack can be passed instead of losses, with low scores for members,
    such as −log of a likelihood ratio.

    The limits of Clopper and Pearson treat examples as independent, although those of one model
    share its noise. They assume that chance alone decided which examples were in the data: members
    and non-members from different sources may differ for other reasons. `audit_one_run` needs only
    independent coins.

    Privacy: the report reads private losses without noise. It is not private itself.

    Args:
      losses_in: (m,), a loss for each unit of privacy in the training data: one for each user if
        the guarantee is for users.
      losses_out: (n,), the losses of units outside of the data, drawn from the same population. A
        rate α needs many more than 1/α of them.
      guarantee: the guarantee of the training, from `accounting.guarantee` or
        `PrivacyPlan.guarantee`, or a trade-off function. None draws and prints no bound.
      false_positive_rates: α, each in (0, 1).
      confidence: probability that all limits hold, for all rates together.

    Raises:
      ValueError: losses are empty or NaN, a rate or `confidence` is not in (0, 1).

    Source: Yeom et al., "Privacy risk in machine learning: analyzing the connection to
    overfitting", 2018, for the attack; Carlini et al., "Membership inference attacks from first
    principles", 2022, for true-positive rates at low false-positive rates.

    >>> from dpoptax import auditing
    >>> rng = np.random.default_rng(0)
    >>> losses = rng.exponential(size=5000), rng.exponential(size=5000)
    >>> claim = auditing.gaussian_trade_off(0.5)
    >>> print(membership_report(*losses, guarantee=claim))
    Membership by loss: 5,000 examples in, 5,000 out, AUC 0.492
      FPR     TPR     limits of TPR   bound
    0.1 %  0.24 %  0.10 % to 0.47 %  0.48 %
      1 %  1.02 %  0.70 % to 1.43 %  3.39 %
    With 95 % confidence for independent examples, the guarantee is not refuted.
    A weak attack proves nothing.
    """
    within, outside = _losses("losses_in", losses_in), _losses("losses_out", losses_out)
    rates = np.asarray(false_positive_rates, np.float64).reshape(-1)
    if not rates.size or not np.all((rates > 0) & (rates < 1)):
        raise ValueError(f"`false_positive_rates` must be in (0, 1), got {false_positive_rates}.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be in (0, 1), got {confidence}.")
    # The threshold is itself one of `losses_out`. So the true false-positive rate is below a
    # Beta(k, n + 1 - k) variable, for which the limits of k - 1 hold, with any ties.
    permitted = np.floor(rates * len(outside)).astype(int)
    thresholds = outside[permitted]
    taken = np.searchsorted(outside, thresholds, side="left")
    missed = len(within) - np.searchsorted(within, thresholds, side="left")
    errors = curve_of_counts(taken, permitted, len(outside), missed, len(within), confidence)
    claimed = guarantee.trade_off if isinstance(guarantee, Guarantee) else guarantee
    return MembershipReport(within, outside, rates, errors, claimed)


def _losses(name: str, losses: ArrayLike) -> Array:
    values = np.asarray(losses, np.float64)
    if values.ndim != 1 or not values.size or np.isnan(values).any():
        raise ValueError(
            f"`{name}` must be numbers of shape (examples,) without NaN, got shape {values.shape}. "
            "Pass one loss for each example, not their mean."
        )
    return np.sort(values)


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"
