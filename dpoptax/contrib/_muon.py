"""Muon for privatized gradients, with singular vectors weighted by their signal."""

import jax
import optax
from jax.typing import DTypeLike

from dpoptax._support.tree import PyTree, check_decays
from dpoptax.contrib._shrinkage import orthogonalized
from dpoptax.contrib._singular_values import is_kernel
from dpoptax.filters._lp_adam import scale_by_lp_adam


def scale_by_shrunk_muon(
    stddev: float,
    *,
    decay: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.999,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Rescales updates by Muon with noise-aware orthogonalization.

    Muon replaces all singular values of a kernel's running mean gradient by 1, including noise. Let
    m_t = U diag(s) Vᵀ be the bias-corrected running mean of a kernel of shape (m, n), and τ the
    noise left in it (see `singular_value_shrinkage`). Then

        update = √max(1, n/m) U diag(c) Vᵀ,
        c = q/(s x),  q = √((s² − τ²(√m + √n)²)(s² − τ²(√m − √n)²)),  x² = (s² − (m + n)τ² + q)/2

    if s > τ(√m + √n), and c = 0 otherwise. c is the product of the cosines between the observed
    singular vectors and those of the signal. Of all matrices with the observed vectors, U diag(c)
    Vᵀ is closest to the U Vᵀ of the signal, in the limit of large matrices of small rank. If
    `stddev` is 0, c is 1. This is then `optax.contrib.muon`, which also works after the noise
    stage, without Nesterov's term and with an exact decomposition instead of the Newton–Schulz
    iteration.

    Leaves with fewer than two axes use `scale_by_lp_adam` with the same `stddev`, which is
    DP-AdamBC. To exclude kernels such as embeddings, use `optax.partition`.

    Input: privatized mean gradients with white noise. Output: directions of order 1. Privacy:
    post-processing, at no cost. Memory: one copy of the kernels, two of the other leaves. Each step
    computes the singular value decomposition of every kernel, unsharded on every device.

    Args:
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`.
      decay: decay of the running mean of kernels, in [0, 1).
      b1: decay of the other leaves' first moment, in [0, 1).
      b2: decay of the other leaves' second moment, in [0, 1).
      accumulator_dtype: the dtype of the running means. Defaults to that of the parameters.

    Raises:
      ValueError: a number is out of range.

    Source: Jordan et al., "Muon", 2024; Kim and Fan, "DP-Muon", 2026, for Muon after the noise
    (whose bias correction is different and is not implemented here); Benaych-Georges and
    Nadakuditi, "The singular values and vectors of low rank perturbations of large rectangular
    random matrices", 2012, for the cosines. The combination is specific to dpoptax.

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
    """Applies the optimizer `scale_by_shrunk_muon` times −learning_rate.

    Place it after the noise stage. Units, privacy, errors and sources are those of
    `scale_by_shrunk_muon`.

    Args:
      learning_rate: a number or a schedule.
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`.
      decay: decay of the running mean of kernels.
      b1: decay of the other leaves' first moment.
      b2: decay of the other leaves' second moment.

    >>> tx = shrunk_muon(0.02, stddev=1.1 * 1.0 / 256)
    """
    return optax.chain(
        scale_by_shrunk_muon(stddev, decay=decay, b1=b1, b2=b2),
        optax.scale_by_learning_rate(learning_rate),
    )


def _labels(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: "kernel" if is_kernel(p) else "other", params)
