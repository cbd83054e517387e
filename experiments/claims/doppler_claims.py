"""Checks DOPPLER's claims about the responses of its filters."""

import numpy as np

from dpoptax import filters as analysis
from experiments import studies
from experiments.claims.study_rows import Findings, Parts, Row, pick, verdict


def filters(seeds: int) -> Parts:
    """Computes responses of the filters in DOPPLER's Tables 2 and 4."""
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
    """Checks that all are low-pass filters of unit gain."""
    names = (*studies.DOPPLER_TABLE_2, *studies.DOPPLER_TABLE_4)
    passed = [pick(rows, "value", filter=name, response="frequency")[0] for name in names]
    highest = {
        name: pick(rows, "value", filter=name, response="frequency")[-1]
        for name in names
        if name != "none"
    }
    weakest = max(highest, key=lambda name: highest[name])
    kappa = {name: analysis.impulse_response(analysis.preset(name), 1000) for name in names}
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
