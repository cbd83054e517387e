"""The linear filter that every method of the family puts behind the noise."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clip.clipped_sum import check_released
from dpoptax._tree import PyTree
from dpoptax.filters._coefficients import validate


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


def mean_share(decay: float, forgotten: jax.Array) -> jax.Array:
    """Σ w_i² = (1 − β)/(1 + β) · (1 + β^n)/(1 − β^n) of a running mean of n steps, w_i ∝ β^i.

    What it leaves of the variance of independent noise; β^n is `forgotten`.
    """
    return (1.0 - decay) / (1.0 + decay) * (1.0 + forgotten) / (1.0 - forgotten)


def low_pass(
    b: Sequence[float],
    a: Sequence[float] = (),
    *,
    start: Literal["corrected", "steady", "zero"] = "corrected",
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """A linear filter over time with rational transfer function, applied to every coordinate.

        m_t = −Σ_{τ≥1} a_τ m_{t−τ} + Σ_{τ≥0} b_τ g_{t−τ}

    `a` is without its leading 1: with scipy it reads `scipy.signal.lfilter(b, [1, *a], g)`. Compare
    `optax.ema`, which is b = (1 − decay,), a = (−decay,), and `optax.trace`, whose gain is
    1/(1 − decay) and not 1. Computed in direct form II transposed: max(len(a), len(b) − 1) buffers,
    each read and written once a step.

    Input and output: any gradients, shapes and units kept. Privacy: post-processing; behind the
    noise stage it costs nothing.

    Args:
      b: feed-forward coefficients b_0, b_1, …
      a: feedback coefficients a_1, a_2, …
      start: what came before step 0. "corrected": zeros, and the output is divided by c_t, the same
        filter's response to the constant 1, so that its weights sum to 1 from the first step.
        "steady": g_0 for ever, so m_0 = g_0. "zero": zeros, uncorrected.
      accumulator_dtype: the buffers' dtype; by default the parameters'. Feedback near 1 wants
        float32 buffers under bfloat16 parameters.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: no or non-finite coefficients, a pole on or outside the unit circle, a gain
        Σb − Σa other than 1, or with "corrected" a c_t that is not positive.

    Source: Zhang et al., "DOPPLER", 2024, Algorithm 2 (lines 6 to 8); the paper keeps len(a) +
    len(b) − 1 buffers.

    >>> import jax.numpy as jnp
    >>> tx = low_pass(b=[0.1], a=[-0.9])
    >>> out, state = tx.update(jnp.array(2.0), tx.init(jnp.array(0.0)))
    >>> out.item()
    2.0
    """
    if start not in ("corrected", "steady", "zero"):
        raise ValueError(f"start={start!r}: want 'corrected', 'steady' or 'zero'")
    b, a = validate(b, a, correctable=start == "corrected")
    order = max(len(a), len(b) - 1)
    taps = tuple(b) + (0.0,) * (order + 1 - len(b))
    feedback = (0.0, *a) + (0.0,) * (order - len(a))
    # The buffers that a constant input of 1 leaves behind, for a start in the steady state.
    steady = [sum(taps[i:]) - sum(feedback[i:]) for i in range(1, order + 1)]

    def step(
        x: jax.Array, buffers: Sequence[jax.Array | float]
    ) -> tuple[jax.Array, list[jax.Array]]:
        y = taps[0] * x + (buffers[0] if order else 0.0)
        shifted: list[jax.Array | float] = [*buffers[1:], 0.0][:order]
        return y, [
            s + bi * x - ai * y for s, bi, ai in zip(shifted, taps[1:], feedback[1:], strict=True)
        ]

    def init_fn(params: PyTree) -> LowPassState:
        zeros = [optax.tree.zeros_like(params, dtype=accumulator_dtype) for _ in range(order)]
        # Not empty without buffers either: there are checkpoint formats that have no empty arrays.
        correction = jnp.zeros(max(order, 1), jnp.float32)
        return LowPassState(jnp.zeros([], jnp.int32), tuple(zeros), correction)

    def update_fn(
        updates: PyTree, state: LowPassState, params: PyTree = None
    ) -> tuple[PyTree, LowPassState]:
        del params
        check_released("low_pass", updates)
        correction, corrections = step(jnp.ones([], jnp.float32), list(state.correction))
        first = state.count == 0

        def leaf(x: jax.Array, *buffers: jax.Array) -> list[jax.Array]:
            old = list(buffers)
            if start == "steady":
                old = [
                    jnp.where(first, (rest * x).astype(s.dtype), s)
                    for rest, s in zip(steady, buffers, strict=True)
                ]
            y, new = step(x.astype(old[0].dtype) if order else x, old)
            if start == "corrected":
                y = y / correction.astype(y.dtype)
            return [y.astype(x.dtype), *(s.astype(r.dtype) for s, r in zip(new, old, strict=True))]

        columns = [jax.tree.leaves(tree) for tree in (updates, *state.buffers)]
        rows = [leaf(*row) for row in zip(*columns, strict=True)]
        treedef = jax.tree.structure(updates)
        out, *filtered = (
            jax.tree.unflatten(treedef, [r[i] for r in rows]) for i in range(order + 1)
        )
        corrected = jnp.stack(corrections) if order else state.correction
        return out, LowPassState(optax.safe_increment(state.count), tuple(filtered), corrected)

    return optax.GradientTransformation(init_fn, update_fn)
