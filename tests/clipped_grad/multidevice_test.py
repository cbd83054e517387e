"""Tests that need several devices.

They run in separate processes, because JAX fixes the number of devices once.
The checks are in tests/multidevice/; to run one of them directly:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest -n0 tests/multidevice/sums.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK_CHECKS = ("batches", "sums", "streaming", "noise")
CHECKS = (*QUICK_CHECKS, "shrinkage", "scaling", "fitting")


# All checks share one process, which starts and compiles once.
@pytest.mark.parametrize(
    "which",
    [
        "not slow",
        pytest.param("slow and not optimized", marks=pytest.mark.slow),
        pytest.param("slow and optimized", marks=[pytest.mark.slow, pytest.mark.optimized]),
    ],
    ids=str,
)
def test_on_eight_virtual_devices(which, request):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    command += ["--every-case"] * request.config.option.every_case
    checks = QUICK_CHECKS if which == "not slow" else CHECKS
    finished = subprocess.run(
        [*command, "-m", which, *(f"tests/multidevice/{name}.py" for name in checks)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
