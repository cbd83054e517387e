"""The numbers of the synthetic studies as rows, and what the papers' claims come to in them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpoptax import filters as analysis
from dpoptax import studies

Row = dict[str, Any]
Parts = list[Callable[[], list[Row]]]
Findings = list[tuple[str, str, str]]

CORRELATED_ARMS = tuple(
    kind + behind
    for kind in ("poisson", "banded 4", "banded 16", "fixed", "fixed, banded 22")
    for behind in ("", " + filter")
)
"""The arms of `dpoptax.studies.digits_arms` that are trained."""

DRIFTS = (0.03, 0.1, 0.3, 1.0)
"""σ_v/σ_w of the Kalman study."""


def verdict(*points: Any) -> str:
    """What truth values come to: "yes" where all hold, "no" where none does."""
    held = np.concatenate([np.ravel(point) for point in points]).astype(bool)
    return "yes" if held.all() else "in part" if held.any() else "no"


def pick(rows: list[Row], column: str, **where: Any) -> np.ndarray:
    """One column of the rows whose other columns have these values."""
    kept = (row for row in rows if all(row[name] == value for name, value in where.items()))
    return np.array([row[column] for row in kept])


def over(rows: list[Row], x: str, y: str, **where: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values of `x` in rising order, (n,), and of `y` there, one row a seed: (seeds, n)."""
    xs = np.unique(pick(rows, x, **where))
    return xs, np.stack([pick(rows, y, **{**where, x: value}) for value in xs], axis=1)


def filters(seeds: int) -> Parts:
    """Responses of the filters of DOPPLER's tables 2 and 4; nothing is random."""
    del seeds
    return [_filters]


def _filters() -> list[Row]:
    rows: list[Row] = []
    for table, names in (("2", studies.DOPPLER_TABLE_2), ("4", studies.DOPPLER_TABLE_4)):
        responses = studies.filter_responses(names)
        for name in names:
            same = {"table": float(table), "filter": name}
            rows += [
                {**same, "response": "time", "x": step, "value": weight}
                for step, weight in enumerate(responses.kappa[name])
            ]
            rows += [
                {**same, "response": "frequency", "x": omega, "value": decibel}
                for omega, decibel in zip(responses.omega, responses.decibel[name], strict=True)
            ]
    return rows


def filters_findings(rows: list[Row]) -> Findings:
    """All are low-pass filters of unit gain."""
    names = (*studies.DOPPLER_TABLE_2, *studies.DOPPLER_TABLE_4)
    passed = [pick(rows, "value", filter=name, response="frequency")[0] for name in names]
    highest = {
        name: pick(rows, "value", filter=name, response="frequency")[-1]
        for name in names
        if name != "none"
    }
    weakest = max(highest, key=lambda name: highest[name])
    noise = {name: analysis.noise_gain(analysis.preset(name)) for name in names}
    least = min(noise, key=lambda name: noise[name])
    return [
        (
            "slow changes pass unchanged",
            f"at ω = 0.001 all are within {max(np.abs(passed)):.2g} dB of 0",
            verdict(np.abs(passed) < 0.1),
        ),
        (
            "the highest frequencies are damped",
            f"by {-highest[weakest]:.1f} dB ({weakest}) or more; {least} leaves the least of white "
            f"noise, {100 * noise[least]:.1f} % of its power",
            verdict(np.array(list(highest.values())) < -10),
        ),
    ]


def geodp_noise(seeds: int) -> Parts:
    """GeoDP Fig. 3, a gradient and a noise of its own for each seed."""
    return [functools.partial(_geodp, studies.geodp_figure_3, seed) for seed in range(seeds)]


def geodp_beta(seeds: int) -> Parts:
    """GeoDP Fig. 4, likewise."""
    return [functools.partial(_geodp, studies.geodp_figure_4, seed) for seed in range(seeds)]


def _geodp(figure: Callable[..., dict[str, studies.Sweep]], seed: int) -> list[Row]:
    sweeps = figure(repeats=4, key=jax.random.key(seed))
    return [row for panel, sweep in sweeps.items() for row in _errors(panel, sweep, seed)]


def _errors(panel: str, sweep: studies.Sweep, seed: int) -> list[Row]:
    fixed = ", ".join(f"{name} = {value:g}" for name, value in sweep.fixed.items())
    return [
        {
            "panel": panel,
            "varies": sweep.name,
            "fixed": fixed,
            "x": value,
            "seed": seed,
            **{name: errors[i] for name, errors in sweep.errors._asdict().items()},
        }
        for i, value in enumerate(sweep.values)
    ]


def _better(rows: list[Row], quantity: str, **where: Any) -> np.ndarray:
    """Whether GeoDP's mean error is below DP-SGD's, at every x."""
    means = [over(rows, "x", f"{who}_{quantity}", **where)[1].mean(0) for who in ("geodp", "dp")]
    return means[0] < means[1]


def geodp_noise_findings(rows: list[Row]) -> Findings:
    """The four observations of GeoDP's section on the synthetic data."""
    a, d, g = (_better(rows, "direction", panel=panel) for panel in "adg")
    value = _better(rows, "gradient", panel="a")
    small = np.array(
        [
            _better(rows, quantity, panel=panel)
            for panel in "bcefhi"
            for quantity in ("direction", "gradient")
        ]
    )
    batch = over(rows, "x", "dp_direction", panel="g")[1].mean(0)
    sigmas, dimensions, sizes = (np.unique(pick(rows, "x", panel=panel)) for panel in "adg")
    return [
        (
            "β = 1: GeoDP keeps directions and DP keeps gradients, up to σ = 1 (panel a)",
            f"directions: GeoDP better at {a.sum()} of {a.size} σ, up to "
            f"{sigmas[a].max(initial=0):g}; gradients: DP better at "
            f"{(~value).sum()} of {value.size}. This is for ‖ḡ‖ = 0.01 C, which the paper does not "
            "state; at 0.1 C DP keeps both",
            verdict(a == (sigmas <= 1), ~value),
        ),
        (
            "β = 1: GeoDP loses directions above d = 2000 (panel d) and below B = 8192 (g)",
            f"it loses them at {(~d).sum()} of {d.size} d, and at {(~g).sum()} of {g.size} B",
            verdict(~d == (dimensions > 2000), ~g == (sizes < 8192)),
        ),
        (
            "β = 0.1 and 0.01: GeoDP is better in both (panels b, c, e, f, h, i)",
            f"in {100 * np.mean(small):.0f} % of the points, since β² multiplies its noise; no "
            "guarantee that holds depends on β",
            verdict(small),
        ),
        (
            "the direction of DP hardly changes with B (panel g)",
            f"from B = 512 to 16384 its error falls by {100 * (1 - batch[-1] / batch[0]):.0f} %: "
            "it is all noise already",
            verdict(batch > 0.7 * batch[0]),
        ),
    ]


def geodp_beta_findings(rows: list[Row]) -> Findings:
    """GeoDP's claim of a β for every task."""
    found = []
    for panel, named, dimension in (("a", 0.2, 20000), ("b", 0.4, 10000)):
        geodp, dp = (
            pick(rows, f"{who}_direction", panel=panel, x=named).mean() for who in ("geodp", "dp")
        )
        found.append(
            (
                f"at d = {dimension}, β = {named:g} keeps direction and gradient better than DP",
                f"direction: {geodp:.3g} rad² with GeoDP against {dp:.3g}",
                verdict(geodp < dp),
            )
        )
    return found


def kalman_gain(seeds: int) -> Parts:
    """The recursion from two starts, and the filter on simulated gradients."""
    return [functools.partial(_kalman_gain, seeds)]


def _kalman_gain(seeds: int) -> list[Row]:
    rows = []
    for drift in DRIFTS:
        for start in (0.0, 1.0):
            result = studies.kalman_convergence(
                drift_stddev=drift, initial_variance=start, steps=120, seeds=seeds
            )
            rows += [
                {
                    "drift": drift,
                    "start": start,
                    "step": step,
                    "seed": seed,
                    "gain": result.gain[step],
                    "variance": result.variance[step],
                    "gain_limit": result.limits[0],
                    "variance_limit": result.limits[1],
                    "measured": result.measured[seed, step],
                }
                for step in range(result.gain.size)
                for seed in range(seeds)
            ]
    return rows


def kalman_gain_findings(rows: list[Row]) -> Findings:
    """Both converge, and to what the closed form says."""
    needed, close = [], []
    for drift in DRIFTS:
        gain = over(rows, "step", "gain", drift=drift, start=1.0)[1][0]
        limit = pick(rows, "gain_limit", drift=drift)[0]
        away = np.flatnonzero(np.abs(gain / limit - 1) > 0.01)
        needed.append(f"{away.max() + 1 if away.size else 0} (σ_v = {drift:g} σ_w)")
        close.append(abs(gain[-1] / limit - 1) < 0.01)
    ratios = [row["measured"] / row["variance"] for row in rows if row["variance"] > 0]
    return [
        (
            "k_t and p_t converge to κ and p_∞",
            f"within 1 % of κ after {', '.join(needed)} steps, from p = σ_w²",
            verdict(close),
        ),
        (
            "p_t is the error of the estimate",
            f"measured error over p_t: {np.mean(ratios):.3f} on average over steps and seeds",
            verdict(abs(np.mean(ratios) - 1) < 0.03),
        ),
    ]


def noisy_regression(seeds: int) -> Parts:
    """DiSK Fig. 6(a), over the learning rates too; four times as many seeds, for they are cheap."""
    return [functools.partial(_noisy_regression, seeds)]


def _noisy_regression(seeds: int) -> list[Row]:
    result = studies.noisy_regression(seeds=4 * seeds)
    return [
        {
            "method": method,
            "noise": level,
            "learning_rate": rate,
            "seed": seed,
            "excess_loss": result.excess_loss[i, j, k, seed],
        }
        for i, method in enumerate(result.methods)
        for j, level in enumerate(np.round(result.noise_levels.astype(float), 6))
        for k, rate in enumerate(np.round(result.learning_rates.astype(float), 6))
        for seed in range(result.excess_loss.shape[-1])
    ]


def best_loss(rows: list[Row], method: str, noise: float) -> float:
    """Mean over seeds at the method's own best learning rate."""
    losses = over(rows, "learning_rate", "excess_loss", method=method, noise=noise)[1]
    return float(losses.mean(0).min())


def noisy_regression_findings(rows: list[Row]) -> Findings:
    """The Kalman filter has the lowest loss at every noise; by how much depends on the rate."""
    levels, names = np.unique(pick(rows, "noise")), ("Kalman", "noisy GD", "low-pass")
    found: Findings = []
    largest = pick(rows, "learning_rate").max()
    for label, loss in (
        (
            f"at one learning rate, {largest:g}",
            lambda method, noise: pick(
                rows, "excess_loss", method=method, noise=noise, learning_rate=largest
            ).mean(),
        ),
        (
            "at each one's own best learning rate",
            lambda method, noise: best_loss(rows, method, noise),
        ),
    ):
        losses = np.array([[loss(name, noise) for noise in levels] for name in names])
        ratios = losses[1:] / losses[0]
        found.append(
            (
                f"DiSK has the lowest loss at every noise, {label}",
                "; ".join(
                    f"{name}'s is {_between(ratio)} times as high"
                    for name, ratio in zip(names[1:], ratios, strict=True)
                ),
                verdict(ratios > 1),
            )
        )
    return found


def _between(values: np.ndarray) -> str:
    ends = [f"{end:.2f}" for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


def correlated_noise(seeds: int) -> Parts:
    """Training on digits at ε = 1 with every arm."""
    return [functools.partial(_correlated_noise, name, seeds) for name in CORRELATED_ARMS]


def _correlated_noise(name: str, seeds: int) -> list[Row]:
    (result,) = studies.compare_correlated_noise({name: _arms()[name]}, seeds=seeds).values()
    return [
        {
            "noise": name.removesuffix(" + filter"),
            "filtered": "yes" if name.endswith(" + filter") else "no",
            "noise_multiplier": result.noise_multiplier,
            "learning_rate": result.learning_rate,
            "seed": seed,
            "accuracy": float(result.accuracy[seed]),
            "training_loss": float(result.training_loss[seed]),
        }
        for seed in range(seeds)
    ]


@functools.cache
def _arms() -> dict[str, studies.Arm]:
    return studies.digits_arms(bands=(4, 16))


def correlated_noise_findings(rows: list[Row]) -> Findings:
    """Where the pair pays."""

    def accuracy(noise: str, filtered: str) -> str:
        values = pick(rows, "accuracy", noise=noise, filtered=filtered)
        spread = f" ± {values.std(ddof=1):.1f}" if values.size > 1 else ""
        return f"{values.mean():.1f}{spread} %"

    def gain(noise: str, filtered: str) -> float:
        arm = pick(rows, "accuracy", noise=noise, filtered=filtered).mean()
        return arm - pick(rows, "accuracy", noise="poisson", filtered="no").mean()

    fixed = "fixed, banded 22"
    return [
        (
            "without amplification, correlated noise and a filter beat each alone",
            f"{accuracy('fixed', 'no')} with neither, {accuracy('fixed', 'yes')} with the filter, "
            f"{accuracy(fixed, 'no')} with 22 bands, {accuracy(fixed, 'yes')} with both",
            verdict(gain(fixed, "yes") > np.array([gain("fixed", "yes"), gain(fixed, "no")])),
        ),
        (
            "with Poisson sampling too",
            f"{accuracy('poisson', 'no')} for DP-SGD, {accuracy('banded 4', 'yes')} for 4 bands "
            "and the filter",
            verdict(gain("banded 4", "yes") > 1),
        ),
    ]


def release_cosines(seeds: int) -> Parts:
    """Cosine between release and truth, per geometry and noise."""
    return [functools.partial(_release_cosines, seed) for seed in range(seeds)]


def _release_cosines(seed: int) -> list[Row]:
    clips = studies.direction_clips()
    gradients, truth = studies.heterogeneous_gradients(seed)
    rows = []
    for multiplier in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        cosines = studies.release_cosines(
            gradients, truth, clips, noise_multiplier=multiplier, key=jax.random.key(seed)
        )
        rows += [
            {"geometry": name, "noise_multiplier": multiplier, "seed": seed, "cosine": cosine}
            for name, cosine in cosines.items()
        ]
    return rows


def release_cosines_findings(rows: list[Row]) -> Findings:
    """Whether bounding angles keeps directions better than bounding norms."""
    names = sorted(set(pick(rows, "geometry")))
    found: Findings = []
    for multiplier in (0.0, 1.0, 4.0):
        means = {
            name: pick(rows, "cosine", geometry=name, noise_multiplier=multiplier).mean()
            for name in names
        }
        best = max((name for name in names if name != "l2"), key=lambda name: means[name])
        found.append(
            (
                f"bounded angles keep the direction better, at noise multiplier {multiplier:g}",
                f"cosine {means['l2']:.2f} with the l2 clip, at most {means[best]:.2f} with angles "
                f"({best})",
                verdict(means[best] > means["l2"]),
            )
        )
    return found
