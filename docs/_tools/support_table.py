"""Writes the table of supported combinations of method, sampler and accountant.

    python docs/_tools/support_table.py

asks the library for ε in every combination and replaces the table in `docs/privacy/support.md`.
A slow test compares the two.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import dpoptax
from dpoptax import matrix, sampling

PAGE = Path(__file__).parents[1] / "privacy" / "support.md"
BEGIN, END = "<!-- begin table -->", "<!-- end table -->"
ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "monte_carlo": "MC"}
_STEPS, _N, _B, _DELTA = 2, 4000, 40, 1e-5


def table_of_page():
    """Returns the table that the page holds."""
    return PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0].strip()


def write_page():
    """Replaces the table of the page."""
    head, rest = PAGE.read_text("utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{support_table()}\n{END}{tail}", "utf-8")


def samplers():
    """Returns the sampler of each column."""
    common = {"dataset_size": _N, "batch_size": _B, "seed": 0}
    return {
        "Poisson": sampling.PoissonSampler(**common),
        "Poisson, few padded": sampling.PoissonSampler(**common, max_batch_size=50),
        "fixed size": sampling.FixedSizeSampler(**common),
        "balls in bins": sampling.RandomAllocationSampler(**common),
        "random allocation": sampling.RandomAllocationSampler(**common, participations=2),
        "min separation": sampling.MinSeparationSampler(**common, separation=4),
        "cyclic": matrix.CyclicPoissonSampler(**common, cycle_length=4),
        "cyclic, full groups": matrix.CyclicPoissonSampler(**common, cycle_length=_N // _B),
        "shuffled": sampling.ShuffledSampler(**common),
    }


def methods():
    """Returns the clip and the chain of each row."""
    clip, release = dpoptax.l2_clip(1.0), {"noise_multiplier": 2.0, "batch_size": _B}
    key = jax.random.key(0)
    white = dpoptax.gaussian_noise(**release, key=key)
    stddev = dpoptax.extend.noise_stddev(clip, **release)
    low_pass = dpoptax.filters.preset("doppler-first-order-1")
    banded = dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **release, key=key)
    buffered = matrix.BufferedToeplitz((0.5,), (0.4,), steps=_STEPS)
    sphere = dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=1.0)
    adaptive = dpoptax.contrib.adaptive_clip(1.0)
    rows = dpoptax.tables.RowSelection(table_size=9, capacity=3, threshold=8.0)
    selecting = dpoptax.tables.row_selecting_clip(clip, rows)
    return {
        "DP-SGD": (clip, white),
        "DP-SGD, `fixed_point`": (
            clip,
            dpoptax.gaussian_noise(**release, key=key, fixed_point=True),
        ),
        "DOPPLER, `low_pass`": (clip, optax.chain(white, dpoptax.doppler())),
        "DiSK": (clip, optax.chain(white, dpoptax.disk())),
        "DP-PMLF": (clip, optax.chain(white, dpoptax.pmlf())),
        "inner-outer momentum": (
            clip,
            optax.chain(white, dpoptax.contrib.inner_outer(2, 0.5, 0.9)),
        ),
        "`adaptive_kalman`": (clip, optax.chain(white, dpoptax.adaptive_kalman(stddev))),
        "`lp_adam`": (clip, optax.chain(white, dpoptax.lp_adam(0.1, *low_pass))),
        "`adam_bc`": (clip, optax.chain(white, dpoptax.contrib.adam_bc(0.1, stddev=stddev))),
        "`optax.contrib.muon`": (clip, optax.chain(white, optax.contrib.muon(0.1))),
        "DP-SignSGD": (clip, optax.chain(white, optax.scale_by_sign())),
        "`adaptive_clip`": (
            adaptive,
            dpoptax.contrib.adaptive_gaussian_noise(adaptive, **release, key=key),
        ),
        "`hyperspherical_clip`": (sphere, white),
        "`row_selecting_clip`": (
            selecting,
            dpoptax.tables.row_selecting_noise(selecting, **release, key=key),
        ),
        "correlated noise, 2 bands": (clip, banded),
        "correlated noise, buffered": (
            clip,
            dpoptax.correlated_noise(buffered, **release, key=key),
        ),
        "correlated noise, banded inverse": (
            clip,
            dpoptax.correlated_noise(
                matrix.BandedInverseToeplitz((1.0, -0.5), _STEPS), **release, key=key
            ),
        ),
        "two noise stages": (clip, optax.chain(white, optax.identity())),
        "GeoDP as published": (clip, dpoptax.contrib.geodp(0.1, **release, key=key)),
        "no noise stage": (clip, optax.identity()),
    }


def state_of(clip, transform):
    """Returns the state of the chain after a few releases."""
    params = {"w": jnp.ones(3)}
    state = transform.init(params)
    if clip.selects:
        return _state_of_rows(clip, transform)
    grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p["w"] * x), clip)
    for _ in range(_STEPS):
        clipped = grad_fn(dpoptax.gradient_points(state, params), jnp.ones((_B, 3)))
        _, state = transform.update(clipped, state, params)
    return state


def _state_of_rows(clip, transform):
    """Returns the state of a chain that trains the rows of a table."""
    table, batch = jnp.ones((clip.selection.table_size, 3)), (jnp.ones(_B, int), jnp.ones(_B))
    grad_fn = dpoptax.tables.selected_grad(
        lambda p, x: x[1] * jnp.sum(dpoptax.tables.look_up(p, x[0])), clip, where=lambda p: p
    )
    state = transform.init(table)
    for _ in range(_STEPS):
        found = grad_fn(state, table, batch)
        _, state = transform.update(found.sum, state, found.params)
    return state


def accountants_of(method, clip, transform):
    """Returns, for each sampler, the accountants that state an ε for the method."""
    state = () if method == "no noise stage" else state_of(clip, transform)
    if method == "two noise stages":
        second = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=_B, key=jax.random.key(1))
        state = (state, state_of(clip, second))
    return {
        name: [label for a, label in ACCOUNTANTS.items() if _states_epsilon(state, sampler, a)]
        for name, sampler in samplers().items()
    }


def _states_epsilon(state, sampler, accountant):
    try:
        spent = dpoptax.accounting.guarantee(state, sampler, accountant=accountant).epsilon(_DELTA)
    except ValueError:
        return False
    if not 0 < spent < float("inf"):
        raise AssertionError(f"{sampler}: ε = {spent} is stated")
    return True


def support_table():
    """Returns the table in Markdown: for equal methods a row, with the accountants or ✗."""
    names = list(samplers())
    rows = {}
    for method, (clip, transform) in methods().items():
        found = accountants_of(method, clip, transform)
        cells = " | ".join(", ".join(found[name]) or "✗" for name in names)
        rows.setdefault(cells, []).append(method)
    lines = ["| | " + " | ".join(names) + " |", "|:--|" + ":--|" * len(names)]
    lines += [f"| {'; '.join(those)} | {cells} |" for cells, those in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    write_page()
