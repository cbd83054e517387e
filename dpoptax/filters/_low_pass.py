"""The linear filter that all low-pass methods apply after the noise, and DOPPLER."""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clipped_sum.clipped_sum import check_released
from dpoptax._support.tree import PyTree
from dpoptax.filters._coefficients import resolve_preset, validate


class LowPassState(NamedTuple):
    """State of `low_pass`.

    Attributes:
      count: the number of updates so far, int32.
      buffers: max(len(a), len(b) − 1) trees shaped like the parameters.
      correction: the same buffers for the constant input 1, float32 of shape (buffers,).
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    buffers: tuple[PyTree, ...]
    correction: jax.Array


def low_pass(
    b: Sequence[float],
    a: Sequence[float] = (),
    *,
    start: Literal["corrected", "steady", "zero"] = "corrected",
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Applies a linear filter over time to every coordinate.

        m_t = −Σ_{τ≥1} a_τ m_{t−τ} + Σ_{τ≥0} b_τ g_{t−τ}

    `a` omits its leading 1; with scipy this is `scipy.signal.lfilter(b, [1, *a], g)`. `optax.ema`
    is b = (1 − decay,), a = (−decay,). `optax.trace` has gain 1/(1 − decay) instead of 1. The
    filter is computed in direct form II transposed: it reads and writes each of max(len(a),
    len(b) − 1) buffers once per step.

    Input and output: any gradients, of the same shape and units. Privacy: post-processing, at no
    cost after the noise stage.

    Args:
      b: feed-forward coefficients b_0, b_1, …
      a: feedback coefficients a_1, a_2, …
      start: the assumed inputs before step 0. "corrected": zeros, and the output is divided by c_t,
        the filter's response to the constant 1, so that its weights sum to 1 from the first step.
        "steady": g_0, so m_0 = g_0. "zero": zeros, without correction.
      accumulator_dtype: the dtype of the buffers. Defaults to that of the parameters. If feedback
        is near 1 and parameters are bfloat16, use float32 buffers.

    Raises:
      ValueError: `b` is empty, a coefficient is not finite, a pole is on or outside the unit
        circle, the gain Σb − Σa is not 1, or, with "corrected", some c_t is not positive.

    Source: Zhang et al., "DOPPLER", 2024, Algorithm 2 (lines 6 to 8), which keeps
    len(a) + len(b) − 1 buffers.

    >>> import jax.numpy as jnp
    >>> tx = low_pass(b=[0.1], a=[-0.9])
    >>> out, state = tx.update(jnp.array(2.0), tx.init(jnp.array(0.0)))
    >>> out.item()
    2.0
    """
    if start not in ("corrected", "steady", "zero"):
        raise ValueError(f"`start` must be 'corrected', 'steady' or 'zero', got {start!r}.")
    b, a = coefficients = validate(b, a, correctable=start == "corrected")
    order = coefficients.order
    taps = tuple(b) + (0.0,) * (order + 1 - len(b))
    feedback = (0.0, *a) + (0.0,) * (order - len(a))
    # The buffers after a constant input of 1, to start in the steady state.
    steady = [sum(taps[i:]) - sum(feedback[i:]) for i in range(1, order + 1)]
    filtered = functools.partial(_transposed_form, taps, feedback)

    def init_fn(params: PyTree) -> LowPassState:
        zeros = [optax.tree.zeros_like(params, dtype=accumulator_dtype) for _ in range(order)]
        # At least one entry, because some checkpoint formats do not support empty arrays.
        correction = jnp.zeros(max(order, 1), jnp.float32)
        return LowPassState(jnp.zeros([], jnp.int32), tuple(zeros), correction)

    def update_fn(
        updates: PyTree, state: LowPassState, params: PyTree = None
    ) -> tuple[PyTree, LowPassState]:
        del params
        check_released("low_pass", updates)
        correction, corrections = filtered(jnp.ones([], jnp.float32), list(state.correction))
        first = state.count == 0

        def leaf(x: jax.Array, *buffers: jax.Array) -> list[jax.Array]:
            old = list(buffers)
            if start == "steady":
                old = [
                    jnp.where(first, (rest * x).astype(s.dtype), s)
                    for rest, s in zip(steady, buffers, strict=True)
                ]
            y, new = filtered(x.astype(old[0].dtype) if order else x, old)
            if start == "corrected":
                y = y / correction.astype(y.dtype)
            return [y.astype(x.dtype), *(s.astype(r.dtype) for s, r in zip(new, old, strict=True))]

        columns = [jax.tree.leaves(tree) for tree in (updates, *state.buffers)]
        rows = [leaf(*row) for row in zip(*columns, strict=True)]
        treedef = jax.tree.structure(updates)
        out, *buffers = (
            jax.tree.unflatten(treedef, [r[i] for r in rows]) for i in range(order + 1)
        )
        corrected = jnp.stack(corrections) if order else state.correction
        return out, LowPassState(optax.safe_increment(state.count), tuple(buffers), corrected)

    return optax.GradientTransformation(init_fn, update_fn)


def _transposed_form(
    taps: Sequence[float],
    feedback: Sequence[float],
    x: jax.Array,
    buffers: Sequence[jax.Array | float],
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns output and buffers after one step in direct form II transposed.

    Each buffer holds a partial sum of a later output.
    """
    order = len(taps) - 1
    y = taps[0] * x + (buffers[0] if order else 0.0)
    shifted: list[jax.Array | float] = [*buffers[1:], 0.0][:order]
    return y, [
        s + bi * x - ai * y for s, bi, ai in zip(shifted, taps[1:], feedback[1:], strict=True)
    ]


def doppler(
    b: Sequence[float] | None = None,
    a: Sequence[float] = (),
    *,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Applies DOPPLER's bias-corrected low-pass filter to privatized gradients.

        m_t = −Σ_{τ≥1} a_τ m_{t−τ} + Σ_{τ≥0} b_τ g_{t−τ},    update_t = m_t / c_t

    c_t is the filter's response to the constant 1. Gradients change slowly and the noise is white,
    so the filter keeps low frequencies. Place it between `dpoptax.gaussian_noise` and any optax
    optimizer. `dpoptax.filters.preset(name)` returns the papers' coefficients b and a.

    Input and output: privatized mean gradients of the same shape and units. Privacy:
    post-processing, at no cost. Memory: max(len(a), len(b) − 1) copies of the parameters.

    Args:
      b: feed-forward coefficients b_0, b_1, … `None` means b and a of the first filter of order 1
        in the paper's Table 2, `dpoptax.filters.preset("doppler-first-order-1")`.
      a: feedback coefficients a_1, a_2, …, without the leading 1.
      accumulator_dtype: the dtype of the buffers. Defaults to that of the parameters.

    Raises:
      ValueError: the filter is unstable or its gain is not 1, as in `dpoptax.low_pass`; or `a` is
        given without `b`.

    Source: Zhang et al., "DOPPLER: Differentially Private Optimizers with Low-pass Filter for
    Privacy Noise Reduction", 2024, Algorithm 2. Its stability condition (A.2) has the roots on the
    wrong side of the unit circle; this function checks the poles.

    >>> tx = doppler()  # b=[1 / 11, 1 / 11], a=[-9 / 11]
    """
    b, a = resolve_preset(b, a, "doppler-first-order-1")
    return low_pass(b, a, start="corrected", accumulator_dtype=accumulator_dtype)
