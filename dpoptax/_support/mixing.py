"""Mixes the bits of numbers, for checksums that detect mistakes."""

import jax
import numpy as np

# Multipliers of the hash "lowbias32" (C. Wellons, 2018).
_MIX = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def mixed(x: jax.Array) -> jax.Array:
    """Applies a bijection of 32 bits, so that changes do not cancel in a sum.

    This includes changes of sign.
    """
    x = (x ^ (x >> np.uint32(16))) * _MIX[0]
    x = (x ^ (x >> np.uint32(15))) * _MIX[1]
    return x ^ (x >> np.uint32(16))
