"""Runs checks on eight virtual devices in another process, because JAX fixes their number once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_on_eight_devices(which, *arguments):
    """Runs pytest with the marks `which` and other arguments, and asserts that it passes."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "-m", which, *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
