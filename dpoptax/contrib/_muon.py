"""Muon for privatized gradients: what is orthogonalized is what is above the noise."""

import jax
import optax
from jax.typing import DTypeLike

from dpoptax._methods.lp_adam import scale_by_lp_adam
from dpoptax._methods.singular_values import is_kernel
from dpoptax._tree import PyTree, check_decays
from dpoptax.contrib._shrinkage import orthogonalized


def scale_by_shrunk_muon(
    stddev: float,
    *,
    decay: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.999,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Muon whose orthogonalization knows the noise: U diag(c) Vᵀ in the place of U Vᵀ.

    Muon takes all singular values of a kernel's running mean gradient for 1. Under noise most of
    them are noise, and so would be most of the step. With m_t = U diag(s) Vᵀ the bias-corrected
    running mean, τ the noise that is left in it (see `singular_value_shrinkage`) and (m, n) the
    kernel's shape,

        update = √max(1, n/m) U diag(c) Vᵀ,
        c = q/(s x),  q = √((s² − τ²(√m + √n)²)(s² − τ²(√m − √n)²)),  x² = (s² − (m + n)τ² + q)/2

    where s > τ(√m + √n), and c = 0 elsewhere. c is the product of the cosines between the singular
    vectors that are seen and those of the signal: of all matrices with these vectors, U diag(c) Vᵀ
    is next to the signal's own U Vᵀ, in the limit of large matrices of small rank. c is near 1 far
    above the noise, and everywhere at `stddev` 0: then this is Muon without Nesterov's term, with
    an exact decomposition for Newton and Schulz' iteration. Muon as it is stands behind the noise
    too: `optax.contrib.muon`.

    Leaves of fewer than two axes get `scale_by_lp_adam` with the same `stddev`, which is
    DP-AdamBC. To keep kernels out of it, such as embeddings, wrap it in `optax.partition`.

    Input: privatized mean gradients with white noise. Output: their direction, of order 1.
    Privacy: post-processing, no cost: only released values and the public noise level are read.
    Memory: one copy of the kernels, two of the other leaves. A step computes the singular value
    decomposition of each kernel, whole on every device.

    Args:
      stddev: the noise's standard deviation in the released mean, absolute; see
        `dpoptax.extend.noise_stddev`.
      decay: of the running mean of kernels, in [0, 1).
      b1: decay of the other leaves' first moment, in [0, 1).
      b2: decay of the other leaves' second moment, in [0, 1).
      accumulator_dtype: the dtype of the running means; by default the parameters'.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: a number outside its range.

    Sources: Jordan et al., "Muon", 2024; Kim and Fan, "DP-Muon", 2026, for Muon behind the noise
    (their own correction of the bias is another, and not here); Benaych-Georges and Nadakuditi,
    "The singular values and vectors of low rank perturbations of large rectangular random
    matrices", 2012, for the cosines. Their use here is this library's.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_shrunk_muon(0.01)
    >>> noisy = {"kernel": jnp.diag(jnp.array([5.0, 0.5, 0.01]))}
    >>> update, _ = tx.update(noisy, tx.init(noisy), noisy)
    >>> jnp.diag(update["kernel"]).round(2)
    Array([1., 1., 0.], dtype=float32)
    """
    check_decays(b1=b1)
    others = scale_by_lp_adam(
        (1.0 - b1,), (-b1,), b2=b2, stddev=stddev, accumulator_dtype=accumulator_dtype
    )
    kernels = orthogonalized(stddev, decay=decay, accumulator_dtype=accumulator_dtype)
    return optax.partition({"kernel": kernels, "other": others}, _labels)


def shrunk_muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    stddev: float,
    decay: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    """`scale_by_shrunk_muon` times −learning_rate: the whole optimizer behind the noise stage.

    Args:
      learning_rate: a number or a schedule.
      stddev: the noise's standard deviation in the released mean, absolute; see
        `dpoptax.extend.noise_stddev`.
      decay: of the running mean of kernels.
      b1: decay of the other leaves' first moment.
      b2: decay of the other leaves' second moment.

    Units, privacy, errors and sources are those of `scale_by_shrunk_muon`.

    >>> tx = shrunk_muon(0.02, stddev=1.1 * 1.0 / 256)
    """
    return optax.chain(
        scale_by_shrunk_muon(stddev, decay=decay, b1=b1, b2=b2),
        optax.scale_by_learning_rate(learning_rate),
    )


def _labels(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: "kernel" if is_kernel(p) else "other", params)
