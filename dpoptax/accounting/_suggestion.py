"""Suggestion of batch size, steps and noise multiplier for a compute budget."""

import dataclasses
import functools
import math

from dpoptax._pricing.checks import Accountant
from dpoptax._support.argument_checks import integer, number
from dpoptax._support.rounded import to_decimals
from dpoptax.accounting._calibration import calibrate
from dpoptax.sampling import PoissonSampler

# After this many options, the search ends at this excess: smaller batches only add noise, and their
# prices take long to compute.
_FEWEST, _LARGEST_EXCESS = 4, 0.5


@dataclasses.dataclass(frozen=True)
class PlanOption:
    """One way to spend a compute budget.

    Attributes:
      batch_size: B, the expected batch size.
      steps: T, the largest number of steps within the budget.
      noise_multiplier: σ.
      noise_batch_ratio: σ/B, the noise in each coordinate of a mean gradient, relative to C.
      excess: noise_batch_ratio divided by that of T steps on full batches, minus 1.
    """

    batch_size: int
    steps: int
    noise_multiplier: float
    noise_batch_ratio: float
    excess: float


@dataclasses.dataclass(frozen=True)
class PlanSuggestion:
    """Result of `suggest_plan`: ways to spend a compute budget, and the suggested one.

    Attributes:
      chosen: the suggestion.
      options: all options, from the largest batch to the smallest.
      dataset_size: N.
      epsilon: ε of each option.
      delta: δ of each option.
      max_excess: the largest excess that counts as near the limit.
    """

    chosen: PlanOption
    options: tuple[PlanOption, ...]
    dataset_size: int
    epsilon: float
    delta: float
    max_excess: float

    def __str__(self) -> str:
        rows = [("", "B", "T", "epochs", "σ", "σ/B", "excess")]
        for option in self.options:
            rows.append(
                (
                    ">" if option == self.chosen else "",
                    f"{option.batch_size:,}",
                    f"{option.steps:,}",
                    f"{option.steps * option.batch_size / self.dataset_size:.4g}",
                    f"{option.noise_multiplier:.4g}",
                    f"{option.noise_batch_ratio:.3g}",
                    f"{to_decimals(100 * option.excess, 1)} %",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        chosen = self.chosen
        reason = f"the smallest batch within {100 * self.max_excess:g} % of the limit"
        if chosen.excess > self.max_excess:
            reason = "the least noise in a step"
        gain = math.ceil(1000 * chosen.excess / (1 + chosen.excess)) / 10
        lines += [
            f"Suggested: B = {chosen.batch_size:,} and T = {chosen.steps:,}, {reason}.",
            f"More compute would reduce the noise of as many steps by at most {gain:g} %.",
        ]
        epochs = chosen.batch_size * chosen.steps / self.dataset_size
        if epochs < 1:
            lines.append(
                f"The budget uses an example {epochs:.2g} times on average. The guarantee covers "
                "all of them, but a run learns from few."
            )
        return "\n".join(lines)


def suggest_plan(
    *,
    dataset_size: int,
    epsilon: float,
    delta: float,
    examples: float,
    min_steps: int = 100,
    max_excess: float = 0.1,
    accountant: Accountant = "pld",
) -> PlanSuggestion:
    """Suggests a batch size, steps and a noise multiplier for a compute budget.

        minimize B  subject to  B T = examples,  T ≥ min_steps,  σ/B ≤ (1 + max_excess) √T σ₁/N

    The noise-batch ratio σ/B is the noise in each coordinate of a mean gradient, relative to the
    clipping bound. Its least value for T steps is √T σ₁/N, with full batches of all N examples and
    σ₁ the noise multiplier of a single sum at ε. Below some batch size, σ/B grows faster than √T: a
    larger batch avoids this noise at equal compute. Above it, a larger batch only trades steps for
    less noise per step. The rule takes the smallest batch within `max_excess` of the limit, which
    has the most steps. If every batch exceeds `max_excess`, it takes the least noise with at least
    `min_steps` steps.

    The rule depends neither on the model nor on the loss. It compares powers of two, for Poisson
    sampling and independent noise. Tune the learning rate for the chosen option.

    Privacy: each option spends `epsilon` at `delta`. Its arguments are public numbers.

    Args:
      dataset_size: N, the number of examples, or of users.
      epsilon: ε of the run.
      delta: δ of the run, well below 1/N.
      examples: B T, the number of examples processed in all steps. For a transformer with P
        parameters and L tokens per example, F floating-point operations are F/(6PL) examples of
        ordinary training. `dpoptax plan --suggest` counts the operations of a private step.
      min_steps: the least number of steps that suffices for the training.
      max_excess: the largest excess of σ/B over its limit that does not justify a larger batch.
      accountant: as for `calibrate`. "pld" takes about ten seconds. "rdp" takes
        one, and needs more noise.

    Raises:
      ValueError: an argument is out of range, or `calibrate` raises it.

    Source: McKenna et al., "Scaling laws for differentially private language models", 2025: the
    loss depends on the noise-batch ratio, besides model and steps.

    >>> budget = {"dataset_size": 50_000, "epsilon": 3.0, "delta": 1e-6, "examples": 2_500_000}
    >>> print(suggest_plan(**budget, accountant="rdp"))
            B       T  epochs       σ       σ/B  excess
       16,384     152   49.81   6.787  0.000414   2.3 %
        8,192     305   49.97   4.854  0.000593   3.2 %
        4,096     610   49.97   3.476  0.000849   4.6 %
    >   2,048   1,220   49.97    2.51   0.00123   6.8 %
        1,024   2,441   49.99   1.843    0.0018  10.8 %
          512   4,882   49.99   1.388   0.00271  18.1 %
          256   9,765      50   1.084   0.00423  30.3 %
          128  19,531      50  0.8865   0.00693  50.8 %
    Suggested: B = 2,048 and T = 1,220, the smallest batch within 10 % of the limit.
    More compute would reduce the noise of as many steps by at most 6.4 %.
    """
    size = integer("dataset_size", dataset_size, 2, "count the training records, or users")
    min_steps = integer("min_steps", min_steps, 1, "a run has at least one step")
    if not min_steps <= number("examples", examples) < math.inf:
        raise ValueError(
            f"`examples` must be finite and at least `min_steps`, {min_steps}, got {examples}. It "
            "counts the examples of all steps: batch size times steps."
        )
    if not number("max_excess", max_excess) > 0:
        raise ValueError(f"`max_excess` must be positive, got {max_excess}.")
    noise_of = functools.partial(calibrate, epsilon=epsilon, delta=delta, accountant=accountant)
    # σ₁, of one sum over all examples.
    one_sum = noise_of(steps=1, sampling_probability=1.0)
    options: list[PlanOption] = []
    batch_size = 2 ** int(math.log2(min(size, examples / min_steps)))
    while batch_size and (len(options) < _FEWEST or options[-1].excess < _LARGEST_EXCESS):
        steps = int(examples // batch_size)
        sampler = PoissonSampler(size, batch_size, seed=0)
        sigma = noise_of(steps=steps, sampler=sampler)
        ratio = sigma / batch_size
        # (σ/B) / (√T σ₁/N) − 1.
        excess = max(0.0, ratio * size / (one_sum * math.sqrt(steps)) - 1)
        options.append(PlanOption(batch_size, steps, sigma, ratio, excess))
        batch_size //= 2
    near = [option for option in options if option.excess <= max_excess]
    return PlanSuggestion(
        # Options go from large to small batches. The last one is the smallest, and the first has
        # the least noise.
        chosen=near[-1] if near else options[0],
        options=tuple(options),
        dataset_size=size,
        epsilon=epsilon,
        delta=delta,
        max_excess=max_excess,
    )
