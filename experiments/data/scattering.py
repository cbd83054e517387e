"""Computes wavelet scattering of images: fixed features of one image at a time.

Source: Bruna and Mallat (2013). The filters, the reflected border and the order of coefficients are
those of Andreux et al. (2020, Kymatio). The following normalization of groups within one example is
that of Tramèr and Boneh (2021), who train linear models on these features.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import ConfigError
from experiments.data.features import OPPONENT, in_chunks

Colors = Literal["given", "opponent"]
"""Channels that are transformed: those of the image, or three combinations of them."""

_TOGETHER = 32
"""Gray images per chunk, few enough to stay in the processor's cache."""

_EPSILON = 1e-5
"""Added to variances, as in all group normalization."""


@dataclasses.dataclass(frozen=True)
class Scattering:
    """Means of first- and second-order wavelet moduli at 1/2^J of the resolution.

        S x = (x ∗ φ, |x ∗ ψ_λ| ∗ φ, ||x ∗ ψ_λ| ∗ ψ_μ| ∗ φ),   λ = (j, θ), μ = (j′, θ′), j < j′ < J

    ψ_(j,θ) is a Morlet wavelet of scale 2^j along one of L angles, and φ is a Gaussian of scale
    2^J. Each channel of an image gives 1 + J L + L² J (J − 1)/2 successive channels. Each of
    `groups` groups of channels is then normalized to mean 0 and variance 1 over this example.

    Privacy: a function of one example, without parameters and without statistics of others.
    Training on the features has the same privacy cost as training on the examples.

    Attributes:
        scale: J.
        angles: L.
        groups: Number of groups of successive channels. None: no normalization.
        colors: "opponent" replaces R, G and B of each pixel by (R + G + B)/√3, (R − B)/√2 and (R −
            2G + B)/√6 (Ohta, Kanade and Sakai, 1980). Red, green and blue are nearly the same
            image. With a separate normalization, color differences count as much as intensity.

    Example:
        >>> Scattering().shape((28, 28, 1))
        (7, 7, 81)
    """

    name: ClassVar[str] = "scattering"

    scale: int = 2
    angles: int = 8
    groups: int | None = 27
    colors: Colors = "given"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the features of images (height, width, channels).

        Sizes that 2^J does not divide are extended by reflection to the next multiple.

        Raises:
            ConfigError: The examples are not images, an image is too small for its reflected
                border, opponent colors are asked for without three channels, or the groups do not
                divide the channels.
        """
        if len(shape) != 3:
            raise ConfigError(
                "The examples must be images (height, width, channels) for features='scattering', "
                f"got shape {shape}. Use features='none'."
            )
        *sizes, colors = shape
        for size in sizes:
            if self._border(size)[1] >= size:
                raise ConfigError(
                    f"`scale` must be small enough for images of shape {shape}, got {self.scale}, "
                    f"which reflects {self._border(size)[1]} pixels at the border."
                )
        if self.colors == "opponent" and colors != 3:
            raise ConfigError(
                f"`feature_colors` must be 'given' for images of shape {shape}, got 'opponent', "
                "which needs red, green and blue."
            )
        scales, angles = self.scale, self.angles
        channels = colors * (1 + scales * angles + angles**2 * scales * (scales - 1) // 2)
        if self.groups is not None and channels % self.groups:
            raise ConfigError(
                f"`feature_groups` must divide the {channels} channels of the features of images "
                f"of shape {shape}, got {self.groups}. Use a divisor or None."
            )
        height, width = (-(-size // 2**self.scale) for size in sizes)
        return height, width, channels

    def _border(self, size: int) -> tuple[int, int]:
        """Returns the number of reflected pixels before and after `size` pixels."""
        return 2**self.scale, 2**self.scale + -size % 2**self.scale

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from images (N, *shape) to features, float32."""
        out = self.shape(shape)
        height, width, colors = shape
        border = ((0, 0), self._border(height), self._border(width))
        padded = (height + sum(border[1]), width + sum(border[2]))
        cascade = _cascade(self.scale, self.angles, padded)

        def together(planes: jax.Array) -> jax.Array:
            return cascade(jnp.pad(planes, border, mode="reflect"))

        def run(images: jax.Array) -> jax.Array:
            images = images.astype(jnp.float32)
            if self.colors == "opponent":
                mixed = OPPONENT.astype(np.float32)
                images = jnp.einsum("...c,dc->...d", images, mixed, precision="highest")
            planes = jnp.moveaxis(images, -1, 1).reshape(-1, height, width)
            found = in_chunks(together, planes, _TOGETHER)
            features = jnp.moveaxis(found.reshape(-1, out[2], *out[:2]), 1, -1)
            return features if self.groups is None else _normalized(features, self.groups)

        return jax.jit(run)


def _normalized(features: jax.Array, groups: int) -> jax.Array:
    grouped = features.reshape(*features.shape[:3], groups, -1)
    mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
    return ((grouped - mean) / jnp.sqrt(variance + _EPSILON)).reshape(features.shape)


def _cascade(scales: int, angles: int, padded: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    """Returns the map from (B, *padded) to coefficients (B, channels, height, width)."""
    spectra = [
        np.stack([morlet(padded, j, t, angles) for t in range(angles)]) for j in range(scales)
    ]
    averages = [
        tuple(jnp.asarray(matrix, jnp.float32) for matrix in _averages(padded, scales, resolution))
        for resolution in range(scales)
    ]

    out = tuple(size // 2**scales - 2 for size in padded)

    def average(moduli: jax.Array, resolution: int) -> jax.Array:
        rows, columns = averages[resolution]
        means = jnp.einsum("mk,b...kl,nl->b...mn", rows, moduli, columns)
        return means.reshape(len(moduli), -1, *out)

    def moduli(spectrum: jax.Array, scale: int, resolution: int) -> jax.Array:
        # The product with a wavelet of scale 2^j has no frequencies that 1/2^j of the pixels cannot
        # hold.
        wavelets = jnp.asarray(coarser(spectra[scale], resolution), jnp.float32)
        product = spectrum[..., None, :, :] * wavelets
        return jnp.abs(jnp.fft.ifft2(_every(product, 2 ** (scale - resolution))))

    def run(images: jax.Array) -> jax.Array:
        orders: tuple[list[jax.Array], ...] = ([average(images, 0)], [], [])
        spectrum = jnp.fft.fft2(images)
        for first in range(scales):
            once = moduli(spectrum, first, 0)
            orders[1].append(average(once, first))
            again = jnp.fft.fft2(once)
            twice = [
                average(moduli(again, second, first), second).reshape(len(images), angles, -1, *out)
                for second in range(first + 1, scales)
            ]
            if twice:  # every wavelet with all later ones
                joined = jnp.concatenate(twice, axis=2)
                orders[2].append(joined.reshape(len(images), -1, *out))
        return jnp.concatenate([part for order in orders for part in order], axis=1)

    return run


def morlet(size: tuple[int, int], scale: int, angle: int, angles: int) -> np.ndarray:
    """Returns the real Fourier transform of ψ_(j,θ) for images of `size`.

        ψ(u) = g(u) (e^{i ξ·u} − c),   Σ ψ = 0,   |ξ| = 3π/2^{j+2}

    g is a Gaussian with standard deviation 0.8 · 2^j along ξ and L/4 times as much across. With
    this width the angles cover all directions. g and ψ are defined on the plane and wrapped around
    `size`.
    """
    direction = (int(angles - angles / 2 - 1) - angle) * math.pi / angles
    shape: dict[str, Any] = {"stddev": 0.8 * 2**scale, "direction": direction, "slant": 4 / angles}
    envelope = _gabor(size, frequency=0.0, **shape)
    wave = _gabor(size, frequency=0.75 * math.pi / 2**scale, **shape)
    return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def gaussian(size: tuple[int, int], scales: int) -> np.ndarray:
    """Returns the transform of φ, a Gaussian of 0.4 · 2^J, for images of `size`."""
    return np.fft.fft2(_gabor(size, 0.4 * 2**scales, 0.0, 0.0, 1.0)).real


def coarser(spectrum: np.ndarray, halvings: int) -> np.ndarray:
    """Returns the transform of a low-passed image with 1/2^`halvings` of the pixels."""
    for axis in (-2, -1):
        size = spectrum.shape[axis] >> halvings
        beyond = np.s_[size // 2 : spectrum.shape[axis] - (size + 1) // 2]
        spectrum = np.delete(spectrum, beyond, axis)
    return spectrum


def _gabor(
    size: tuple[int, int], stddev: float, direction: float, frequency: float, slant: float
) -> np.ndarray:
    """Returns a wave of length 2π/`frequency` in a Gaussian of integral 1, wrapped."""
    height, width = size
    down = np.arange(-2 * height, 3 * height)[:, None]
    right = np.arange(-2 * width, 3 * width)[None, :]
    along = down * math.cos(direction) + right * math.sin(direction)
    across = right * math.cos(direction) - down * math.sin(direction)
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * stddev**2))
    wave = envelope * np.exp(1j * frequency * along) * slant / (2 * math.pi * stddev**2)
    return wave.reshape(5, height, 5, width).sum((0, 2))


def _every(spectrum: jax.Array, step: int) -> jax.Array:
    """Returns the transform of every `step`-th row and column of the signal."""
    if step == 1:
        return spectrum
    *leading, height, width = spectrum.shape
    parts = spectrum.reshape(*leading, step, height // step, step, width // step)
    return parts.mean((-4, -2))


def _averages(size: tuple[int, int], scales: int, resolution: int) -> tuple[np.ndarray, ...]:
    """Returns matrices that average rows and columns by φ at every 2^J-th pixel."""
    spectrum = coarser(gaussian(size, scales), resolution)
    matrices = []
    for frequencies in (spectrum[:, 0], spectrum[0]):  # φ is a product of one factor per axis
        kernel = np.fft.ifft(frequencies / math.sqrt(spectrum[0, 0])).real
        matrix = np.stack([np.roll(kernel, shift) for shift in range(len(kernel))], axis=1)
        matrices.append(matrix[:: 2 ** (scales - resolution)][1:-1])
    return tuple(matrices)
