"""Tests of the output of `dpoptax audit`: a row per bound, notes, and the figure."""

import numpy as np
import pytest

from dpoptax import auditing
from dpoptax.auditing import _result
from dpoptax.training import task_audit
from dpoptax.training.cli.main import main
from dpoptax.training.config import load_config
from tests.games import skip_games

CLAIMED = 4.377


def _many_runs(mu):
    """Returns the audit of a Gaussian mechanism with `mu` that claims μ = 1."""
    rng = np.random.default_rng(0)
    curve = auditing.trade_off_curve(
        rng.normal(mu, size=40_000), rng.normal(size=40_000), np.linspace(-1.5, 2.5, 24)
    )
    return auditing.AuditResult(
        claimed_epsilon=CLAIMED,
        epsilon_lower_bound=2.0,
        delta=1e-5,
        confidence=0.999,
        trials=40_000,
        threat_model="white-box",
        attack="planted",
        seconds=0.1,
        claimed=auditing.gaussian_trade_off(1.0),
        evidence=curve,
        family=_result.gaussian_family(),
    )


def _rows(mu=1.0):
    return [
        task_audit.Audited("DP-SGD", "one release", _many_runs(mu)),
        task_audit.Audited("DP-SGD", "6 steps", _many_runs(1.0)),
    ]


def test_every_bound_has_a_row_and_a_note():
    rows = _rows()
    lines = task_audit.table(rows).splitlines()[2:]
    methods = [bound.method for row in rows for bound in row.result.bounds]
    assert [line.split("|")[7].strip() for line in lines] == methods
    assert len(methods) == 4
    notes = "\n".join(task_audit.notes(rows))
    assert all(f"By {method}: " in notes for method in methods)
    assert "VIOLATED" not in task_audit.table(rows)
    assert not any(row.violated for row in rows)


def test_rounds_claims_up_and_bounds_down():
    found = auditing.AuditResult(1.0001, 0.9999, 1e-5, 0.999, 100, "white-box", "largest", 0.1)
    assert "claimed ε = 1.001, audited ε ≥ 0.999 " in str(found)
    row = task_audit.table([task_audit.Audited("DP-SGD", "one release", found)]).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[5:7]] == ["1.001", "0.999"]


def test_reports_refuted_claim_in_row_and_notes():
    rows = _rows(mu=1.2)
    assert [row.violated for row in rows] == [True, False]
    marked = [line for line in task_audit.table(rows).splitlines() if "VIOLATED" in line]
    assert len(marked) == 1
    assert "f-DP of the claim" in marked[0]
    assert "DP-SGD, one release, white-box: the claim is refuted." in task_audit.notes(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "code"), [(1.0, 0), (1.2, 1)])
def test_command_prints_bounds_and_fails_on_refuted_claim(monkeypatch, capsys, mu, code):
    monkeypatch.setattr(task_audit, "audit_task", lambda *args, **kwargs: _rows(mu))
    assert main(["audit", "configs/digits/dp_sgd.py"]) == code
    printed = capsys.readouterr().out
    assert task_audit.table(_rows(mu)) in printed
    assert "Each bound alone holds with 99.9 % confidence, at δ = 1e-05." in printed


@pytest.mark.parametrize(
    ("config", "trials", "attacks", "minutes"),
    [
        ("configs/digits/dp_sgd.py", 20_000, 4, 4),
        ("configs/digits/dp_sgd.py", 50_000, 4, 10),
        ("configs/users.py", 100, 4, 2),
    ],
)
def test_says_first_how_many_attacks_take_how_long(
    monkeypatch, capsys, config, trials, attacks, minutes
):
    skip_games(monkeypatch)
    monkeypatch.setattr(task_audit, "_full_batch", lambda run: None)
    monkeypatch.setattr(auditing, "canary_gradient", lambda *args, **options: None)
    rows = task_audit.audit_task(load_config(config).task(), trials=trials, progress=True)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(
        f"dpoptax: {attacks} attacks, which take about {minutes} minutes together"
    )
    assert all(line.startswith("dpoptax: auditing") for line in told[1:])
    assert len(rows) == len(told[1:]) == attacks
