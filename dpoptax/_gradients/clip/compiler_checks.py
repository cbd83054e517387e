"""Checks the clipping bound's assumptions about the compiler."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

# With these settings, XLA or a library that it calls may reorder sums, ignore NaN, or round the
# operands of products that need full precision.
_FORBIDDEN_FLAGS = re.compile(
    "--(xla_cpu_enable_fast_math|xla_enable_fast_math|xla_gpu_default_to_alg_dot_bf16_bf16_f32)"
    r"(?!=(?i:false|0)(\s|$))(=\S*)?(\s|$)"
)
_FORBIDDEN_VARIABLES = {"NVIDIA_TF32_OVERRIDE": ("0",), "ONEDNN_DEFAULT_FPMATH_MODE": ("STRICT",)}


def check_settings() -> None:
    """Raises an error if the environment breaks assumptions about rounding.

    Raises:
      RuntimeError: a flag or variable is set that makes arithmetic less exact than the clipping
        bound assumes.
    """
    if found := _FORBIDDEN_FLAGS.search(_xla_flags()):
        raise RuntimeError(
            f"XLA_FLAGS sets `{found[0].strip()}`, under which the compiler may reorder sums, "
            "ignore NaN or round operands, so the sensitivity of a clipped sum would not hold. "
            "Remove the flag and restart Python."
        )
    for name, allowed in _FORBIDDEN_VARIABLES.items():
        value = os.environ.get(name)
        if value and value.upper() not in allowed:
            raise RuntimeError(
                f"`{name}={value}` lets products round their operands, so the sensitivity of a "
                "clipped sum would not hold. Unset the variable and restart Python."
            )


def _xla_flags() -> str:
    """Returns the flags in `XLA_FLAGS`, or in the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-") and Path(flags).is_file():
        return Path(flags).read_text("utf-8", "replace")
    return flags


def keeps_order(values: jax.Array) -> jax.Array:
    """Returns whether the program adds in the written order and keeps NaN, per value.

    This also detects options that are not in the environment, such as `jax.jit(...,
    compiler_options={"xla_cpu_enable_fast_math": True})`.

    Args:
      values: integers that the compiler cannot know, such as exponents of private numbers.
    """
    mantissa = values.astype(jnp.int32) & 0x7FFFFF
    number, nan = (  # in [1, 2), and NaN
        lax.bitcast_convert_type(mantissa | pattern, jnp.float32)
        for pattern in (jnp.int32(0x3F800000), jnp.int32(0x7FC00000))
    )
    # 2^-30 is lost next to 1. A compiler that reorders sums cancels `number` instead.
    return ((number + 2.0**-30) - number == 0) & (nan != nan)
