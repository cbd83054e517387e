"""Builds the support table, sampler × accountant × method, by asking the code."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import dpoptax
from dpoptax import matrix, sampling

MARK = "<!-- the table of what is supported -->"
ACCOUNTANTS = {"pld": "PLD", "rdp": "RDP", "monte_carlo": "MC"}
_STEPS, _N, _B, _DELTA = 2, 4000, 40, 1e-5


def on_page_markdown(markdown, page, config, files):
    """Replaces the marker with the table."""
    del page, config, files
    return markdown.replace(MARK, support_table()) if MARK in markdown else markdown


def samplers():
    """Returns the samplers by their names in the table."""
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
    """Returns the clip and the chain of each method by its name in the table."""
    clip, release = dpoptax.l2_clip(1.0), {"noise_multiplier": 2.0, "batch_size": _B}
    key = jax.random.key(0)
    white = dpoptax.gaussian_noise(**release, key=key)
    stddev = dpoptax.extend.noise_stddev(clip, **release)
    low_pass = dpoptax.filters.preset("doppler-first-order-1")
    banded = dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **release, key=key)
    buffered = matrix.BufferedToeplitz((0.5,), (0.4,), steps=_STEPS)
    sphere = dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=1.0)
    adaptive = dpoptax.adaptive_clip(1.0)
    rows = dpoptax.tables.RowSelection(table_size=9, capacity=3, threshold=8.0)
    selecting = dpoptax.tables.row_selecting_clip(clip, rows)
    return {
        "DP-SGD": (clip, white),
        "DP-SGD, `fixed_point`": (
            clip,
            dpoptax.gaussian_noise(**release, key=key, fixed_point=True),
        ),
        "DOPPLER, `low_pass`": (clip, optax.chain(white, dpoptax.doppler(*low_pass))),
        "DiSK": (clip, optax.chain(white, dpoptax.disk(0.7, 0.5))),
        "DP-PMLF": (clip, optax.chain(white, dpoptax.pmlf(2, 0.1, *low_pass))),
        "inner-outer momentum": (
            clip,
            optax.chain(white, dpoptax.contrib.inner_outer(2, 0.5, 0.9)),
        ),
        "`adaptive_kalman`": (clip, optax.chain(white, dpoptax.adaptive_kalman(stddev))),
        "`adaptive_fir`": (clip, optax.chain(white, dpoptax.contrib.adaptive_fir(3, stddev))),
        "`lp_adam`": (clip, optax.chain(white, dpoptax.lp_adam(0.1, *low_pass))),
        "`adam_bc`": (clip, optax.chain(white, dpoptax.contrib.adam_bc(0.1, stddev=stddev))),
        "`singular_value_shrinkage`": (
            clip,
            optax.chain(white, dpoptax.contrib.singular_value_shrinkage(stddev)),
        ),
        "`james_stein`": (clip, optax.chain(white, dpoptax.contrib.james_stein(stddev))),
        "`shrunk_muon`": (
            clip,
            optax.chain(white, dpoptax.contrib.shrunk_muon(0.1, stddev=stddev)),
        ),
        "`optax.contrib.muon`": (clip, optax.chain(white, optax.contrib.muon(0.1))),
        "DP-SignSGD": (clip, optax.chain(white, optax.scale_by_sign())),
        "`adaptive_clip`": (
            adaptive,
            dpoptax.adaptive_gaussian_noise(adaptive, **release, key=key),
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
    """Returns the state of the chain after a few real releases."""
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
    """Returns the same state for a table."""
    table, batch = jnp.ones((clip.selection.table_size, 3)), (jnp.ones(_B, int), jnp.ones(_B))
    grad_fn = dpoptax.tables.selected_grad(
        lambda p, x: x[1] * jnp.sum(dpoptax.tables.look_up(p, x[0])), clip, where=lambda p: p
    )
    state = transform.init(table)
    for _ in range(_STEPS):
        found = grad_fn(state, table, batch)
        _, state = transform.update(found.sum, state, found.params)
    return state


def answers():
    """Returns the reason of each refusal, or None if ε is stated.

    The keys are (method, sampler, accountant).
    """
    found = {}
    for method, (clip, transform) in methods().items():
        state = () if method == "no noise stage" else state_of(clip, transform)
        if method == "two noise stages":
            state = (state, state_of(*methods()["DP-SGD"]))
        for sampler, drawn in samplers().items():
            for accountant in ACCOUNTANTS:
                found[method, sampler, accountant] = _refusal(state, drawn, accountant)
    return found


def _refusal(state, sampler, accountant):
    try:
        spent = dpoptax.accounting.epsilon_spent(state, sampler, _DELTA, accountant=accountant)
    except ValueError as error:
        return str(error).replace(f", seed={sampler.seed}", "")
    if not 0 < spent < float("inf"):
        raise AssertionError(f"{sampler}: ε = {spent} is stated")
    return None


def support_table():
    """Returns the answers as a Markdown table, followed by the text of each refusal."""
    found = answers()
    shown = {
        key: reason
        for key, reason in found.items()
        if reason and (key[-1] != "monte_carlo" or all(found[(*key[:2], a)] for a in ACCOUNTANTS))
    }
    reasons = list(dict.fromkeys(shown.values()))
    names = list(samplers())
    lines = ["| | " + " | ".join(names) + " |", "|:--|" + ":--|" * len(names)]
    for method in methods():
        cells = []
        for sampler in names:
            told = {a: found[method, sampler, a] for a in ACCOUNTANTS}
            stated = [name for a, name in ACCOUNTANTS.items() if told[a] is None]
            words = {shown[key] for a in told if (key := (method, sampler, a)) in shown}
            refused = sorted(reasons.index(r) + 1 for r in words)
            marks = ", ".join(f"[{number}](#refusals)" for number in refused)
            refusal = f"✗ {marks}" if refused else ""
            cells.append(", ".join([", ".join(stated)] * bool(stated) + [refusal] * bool(refused)))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {_plain(reason)}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines)


def _plain(text):
    return text.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")
