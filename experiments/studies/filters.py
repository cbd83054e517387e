"""Computes time and frequency responses of the papers' filters (DOPPLER, Fig. 6)."""

import math

import numpy as np
from scipy import signal

from dpoptax import filters
from experiments.studies.rows import Findings, Row, pick, verdict

TABLE_2 = (
    "none",
    "momentum",
    "doppler-first-order-1",
    "doppler-first-order-2",
    "doppler-second-order",
)
"""Names of the filters of DOPPLER's Table 2, for `filters.preset`."""
TABLE_4 = tuple(f"doppler-f{i}" for i in range(1, 7))
"""Names of the filters of DOPPLER's Table 4, for `filters.preset`."""


def rows() -> list[Row]:
    """Returns κ_t over 31 steps and 20 log10 |H(e^{iω})| of each filter, cut off at -100."""
    omega = np.geomspace(1e-3, math.pi, 400)
    found: list[Row] = []
    for table, names in (("2", TABLE_2), ("4", TABLE_4)):
        for name in names:
            same = {"table": float(table), "filter": name}
            chosen = filters.preset(name)
            amplitude = np.abs(signal.freqz(chosen.b, [1, *chosen.a], worN=omega)[1])
            found += [
                {**same, "response": "time", "x": step, "value": weight}
                for step, weight in enumerate(filters.impulse_response(chosen, 31))
            ]
            found += [
                {**same, "response": "frequency", "x": frequency, "value": decibel}
                for frequency, decibel in zip(
                    omega, 20 * np.log10(np.maximum(amplitude, 1e-5)), strict=True
                )
            ]
    return found


def findings(rows: list[Row]) -> Findings:
    """Checks that all are low-pass filters of unit gain."""
    names = (*TABLE_2, *TABLE_4)
    passed = [pick(rows, "value", filter=name, response="frequency")[0] for name in names]
    highest = {
        name: pick(rows, "value", filter=name, response="frequency")[-1]
        for name in names
        if name != "none"
    }
    weakest = max(highest, key=lambda name: highest[name])
    kappa = {name: filters.impulse_response(filters.preset(name), 1000) for name in names}
    noise = {name: np.sum(each**2) for name, each in kappa.items()}
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
