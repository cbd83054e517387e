"""Wavelet scattering as defined by Andreux et al. (2020), one path at a time."""

import numpy as np


def gabor(shape, sigma, theta, xi, slant):
    """Sums the Gabor function g(u) e^{i ξ·u} over all images of the plane's pixel u in `shape`."""
    turn = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
    curvature = turn @ np.diag([1.0, slant**2]) @ turn.T / (2 * sigma**2)
    direction = xi * np.array([np.cos(theta), np.sin(theta)])
    found = np.zeros(shape, complex)
    for down in range(-2, 3):
        for right in range(-2, 3):
            grid = np.mgrid[: shape[0], : shape[1]].astype(float)
            u = np.moveaxis(grid, 0, -1) + np.array([down * shape[0], right * shape[1]])
            form = np.einsum("...i,ij,...j->...", u, curvature, u)
            found += np.exp(-form + 1j * u @ direction)
    return found * slant / (2 * np.pi * sigma**2)


def wavelet(shape, j, t, angles):
    """Returns the Morlet wavelet of scale 2^j along angle t, in space, with sum 0."""
    theta = (int(angles - angles / 2 - 1) - t) * np.pi / angles
    sigma, slant = 0.8 * 2**j, 4 / angles
    wave = gabor(shape, sigma, theta, 3 / 4 * np.pi / 2**j, slant)
    envelope = gabor(shape, sigma, theta, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope


def convolved(x, filter_in_space, resolution):
    """Returns x ∗ filter, where x has 1/2^resolution of the filter's pixels and limits its band."""
    spectrum = np.fft.fft2(filter_in_space).real
    for axis in (0, 1):
        size = spectrum.shape[axis] // 2**resolution
        frequencies = np.fft.fftfreq(spectrum.shape[axis], 1 / spectrum.shape[axis])
        band = (frequencies >= -(size // 2)) & (frequencies < size - size // 2)
        spectrum = spectrum[band] if axis == 0 else spectrum[:, band]
    return np.fft.ifft2(np.fft.fft2(x) * spectrum)


def scattering(image, scales=2, angles=8):
    """Returns coefficients (channels, height / 2^scales, width / 2^scales) of one gray image."""
    side = 2**scales
    border = [(side, side + -size % side) for size in image.shape]
    x = np.pad(image.astype(float), border, mode="reflect")
    psi = {(j, t): wavelet(x.shape, j, t, angles) for j in range(scales) for t in range(angles)}
    phi = gabor(x.shape, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0)

    def mean(u, resolution):
        every = 2 ** (scales - resolution)
        return convolved(u, phi, resolution).real[::every, ::every][1:-1, 1:-1]

    zeroth, first, second = [mean(x, 0)], [], []
    for j, t in psi:
        u = np.abs(convolved(x, psi[j, t], 0)[:: 2**j, :: 2**j])
        first.append(mean(u, j))
        for k, s in psi:
            if k > j:
                every = 2 ** (k - j)
                second.append(mean(np.abs(convolved(u, psi[k, s], j)[::every, ::every]), k))
    return np.stack([*zeroth, *first, *second])


def normalized(features, groups, epsilon=1e-5):
    """Group normalization of one example, channels first."""
    grouped = features.reshape(groups, -1)
    mean, variance = grouped.mean(1, keepdims=True), grouped.var(1, keepdims=True)
    return ((grouped - mean) / np.sqrt(variance + epsilon)).reshape(features.shape)
