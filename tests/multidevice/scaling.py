"""Tests of the scaling table for few devices: compiled programs match the arithmetic."""

import pytest

from benchmarks.scaling import Problem, measure, table

PROBLEM = Problem(devices=(2, 8, 16), width=512, batch_size=4096)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_compiled_step_matches_the_arithmetic(split):
    for devices in (2, 8):
        cost = measure(PROBLEM, devices, split)
        assert cost.flops == pytest.approx(PROBLEM.flops(devices), rel=0.35)
        assert cost.sent == pytest.approx(PROBLEM.traffic(devices), rel=0.01)
        # The noise stage gets the object that was sealed, so no checksum is added over devices.
        scattered = {"all-gather": 2, "reduce-scatter": 2}
        kinds = scattered if split else {"all-reduce": 1}
        assert cost.counts == kinds
    # For more devices than available, the program is only lowered; the bytes are the same.
    lowered = measure(PROBLEM, 16, split)
    assert lowered.flops is None
    assert lowered.sent == pytest.approx(PROBLEM.traffic(16), rel=0.01)


@pytest.mark.slow
def test_table_marks_rows_that_were_not_compiled():
    rows = [line for line in table(PROBLEM).splitlines() if line.startswith("| 16 ")]
    assert len(rows) == 2
    assert all("before compilation" in row for row in rows)
