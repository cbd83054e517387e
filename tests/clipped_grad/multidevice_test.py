"""Tests that need several devices.

They run in separate processes, because JAX fixes the number of devices once.
The checks are in tests/multidevice/; to run one of them directly:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest -n0 tests/multidevice/sums.py`.
"""

import pytest

from tests.devices import check_on_eight_devices

QUICK_CHECKS = ("batches", "sums", "streaming", "noise")
CHECKS = (*QUICK_CHECKS, "scaling", "fitting")


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
    every = ["--every-case"] * request.config.option.every_case
    checks = QUICK_CHECKS if which == "not slow" else CHECKS
    files = [f"tests/multidevice/{name}.py" for name in checks]
    check_on_eight_devices(which, *every, *files)
