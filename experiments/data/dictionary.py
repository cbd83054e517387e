"""Computes image features from a dictionary of random patches, without data.

Source: the pipeline of Coates and Ng (2011), with a dictionary of random whitened patches and both
halves of a soft threshold. The patches come from dead-leaves images (Lee, Mumford and Huang, 2001).
Baradad et al. (2021) and Tang et al. (2023, DP-RandP) learn representations from these without
data.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import ConfigError
from experiments.data.features import OPPONENT, in_chunks

_IMAGES = 2000
"""Number of random images, for the dictionary and the whitening."""

_SHAPES = 250
"""Number of shapes in each image."""

_PATCHES = 50_000
"""Number of patches from all images. Their mean and covariance whiten patches."""

_CONTRAST = 0.0025
"""Added to the variance of a patch: noise of a format with 256 values."""

_RIDGE = 0.1
"""Added to the variances of patches, which are about 1, before whitening."""

_THRESHOLD = 0.5
"""Threshold α of the responses to filters."""

_FLOOR = 1e-3
"""Added to the variances of features before whitening, relative to the largest."""

_TOGETHER = 16
"""Images whose patches are held at once, few enough to stay in the processor's cache."""


@dataclasses.dataclass(frozen=True)
class Dictionary:
    """Responses of an image's cells to a dictionary of patches.

        z(u) = D V (p̂(u) − m),     p̂ = (p − mean p) / √(var p + ε)
        f±(i) = mean over u in cell i of max(±z(u) − α, 0)
        y(i) = W (f(i) − μ),       and all y of an example are scaled to mean square 1

    p(u) are the patches of an image, and i are the cells of a `grid` × `grid` partition of their
    positions. V whitens patches and W whitens the channels of features (regularized ZCA). The rows
    of D are `filters` whitened patches and their mirror images, of length 1.

    f is the mean of the features of the image and of its mirror image, so that both have the same
    features. This suits photographs, where objects face left or right, but not letters.

    D, m, V, μ and W are computed from dead-leaves images. These show discs and rectangles of random
    positions, colors and sizes r with density ∝ r^-3, where near shapes cover far ones. The seed is
    part of this code.

    Privacy: a function of one example, with parameters that do not depend on data. Training on the
    features has the same privacy cost as training on the examples. The defaults are a handful of
    round numbers. They were chosen on held-out training examples of CIFAR-10, which no ε here
    covers.

    Attributes:
        filters: Number of patches, without their mirror images.
        patch: Height and width of a patch.
        grid: Number of cells along each side of an image.

    Example:
        >>> Dictionary().shape((32, 32, 3))
        (3, 3, 400)
    """

    name: ClassVar[str] = "dictionary"

    filters: int = 200
    patch: int = 5
    grid: int = 3

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the features of images (height, width, channels).

        Raises:
            ConfigError: The examples are not images of one or three channels, the images are too
                small for patch and grid, or there are more filters than patches.
        """
        if len(shape) != 3 or shape[-1] not in (1, 3):
            raise ConfigError(
                "The examples must be images (height, width, 1 or 3) for features='dictionary', "
                f"got shape {shape}. Use features='none'."
            )
        if min(shape[:2]) - self.patch + 1 < self.grid:
            raise ConfigError(
                f"`patch` and `grid` must fit images of shape {shape}, got {self.patch} and "
                f"{self.grid}. Use smaller values."
            )
        if self.filters > _PATCHES:
            raise ConfigError(
                f"`filters` must be at most {_PATCHES}, the number of drawn patches, got "
                f"{self.filters}."
            )
        return self.grid, self.grid, 2 * self.filters

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from images to features, float32.

        The shapes are (N, *shape) and (N, *self.shape(shape)). This takes some seconds, because it
        draws the random images.
        """
        self.shape(shape)
        images = dead_leaves(_IMAGES, shape)
        pooled = self._pooled(images)
        found = np.concatenate(
            [np.asarray(pooled(jnp.asarray(part)), np.float64) for part in np.split(images, 10)]
        )
        mean, whitening = _whitening(found.reshape(-1, found.shape[-1]), _FLOOR, relative=True)

        def run(images: jax.Array) -> jax.Array:
            features = jnp.matmul(pooled(images) - mean, whitening, precision="highest")
            square = jnp.mean(features**2, axis=(1, 2, 3), keepdims=True)
            return features / jnp.sqrt(square + 1e-12)

        return jax.jit(run)

    def _pooled(self, images: np.ndarray) -> Callable[[jax.Array], jax.Array]:
        """Returns the map from images to f, with a dictionary of patches of `images`."""
        sides = [size - self.patch + 1 for size in images.shape[1:3]]
        cells = [jnp.asarray(_cells(side, self.grid), jnp.float32) for side in sides]
        filters, offset = self._dictionary(images)

        def patches(images: jax.Array) -> jax.Array:
            rows = [images[:, i : i + sides[0]] for i in range(self.patch)]
            parts = [row[:, :, j : j + sides[1]] for row in rows for j in range(self.patch)]
            return jnp.concatenate(parts, axis=-1)

        def mean(responses: jax.Array) -> jax.Array:
            return jnp.einsum("ih,nhwk,jw->nijk", cells[0], responses, cells[1])

        def together(images: jax.Array) -> jax.Array:
            found = jnp.matmul(_contrast(patches(images), jnp), filters) - offset
            halves = [mean(jnp.maximum(sign * found - _THRESHOLD, 0)) for sign in (1, -1)]
            straight, mirrored = jnp.split(jnp.stack(halves, -2), 2, axis=-1)
            both = (straight + mirrored[:, :, ::-1]) / 2
            return both.reshape(*both.shape[:3], -1)

        def run(images: jax.Array) -> jax.Array:
            return in_chunks(together, images.astype(jnp.float32), _TOGETHER)

        return jax.jit(run)

    def _dictionary(self, images: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Returns (D V)ᵀ, a matrix for patches (…, patch² channels), and D V m."""
        draw, size = np.random.default_rng([1, *images.shape[1:]]), self.patch
        which = draw.integers(len(images), size=_PATCHES)
        down, right = (
            draw.integers(side - size + 1, size=(_PATCHES, 1, 1)) for side in images.shape[1:3]
        )
        rows, columns = np.arange(size)[:, None], np.arange(size)
        patches = images[which[:, None, None], down + rows, right + columns]
        # Adding mirror images makes the covariance symmetric under mirroring, and so the whitening.
        both = np.concatenate([patches, patches[:, :, ::-1]]).reshape(2 * _PATCHES, -1)
        both = _contrast(both.astype(np.float64), np)
        mean, whitening = _whitening(both, _RIDGE)
        chosen = (both[: self.filters] - mean) @ whitening
        chosen /= np.linalg.norm(chosen, axis=1, keepdims=True)
        mirrored = chosen.reshape(self.filters, size, size, -1)[:, :, ::-1]
        filters = whitening @ np.concatenate([chosen, mirrored.reshape(chosen.shape)]).T
        return jnp.asarray(filters, jnp.float32), jnp.asarray(mean @ filters, jnp.float32)


def dead_leaves(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns images (count, *shape) of random overlapping shapes, float32.

    The shapes are discs and rectangles, stretched and rotated at random. Their radii range from 3/4
    of a pixel to 20 pixels with density ∝ r^-3; without this decay, most shapes would
    be large. Colors vary around a color of the image, mostly in intensity, roughly as in
    photographs. Each shape has a gradient of intensity. The values are in the range of the data
    sets: 0 to 1 for gray images, -2 to 2 for three colors.
    """
    height, width, channels = shape
    smallest, largest = 1.5, 40.0  # in half pixels; a pixel is the mean of four values
    down, right = jnp.mgrid[: 2 * height, : 2 * width].astype(np.float32)

    def paint(shapes: dict[str, jax.Array]) -> jax.Array:
        y, x = (
            places[None] - shapes["center"][:, axis, None, None]
            for axis, places in enumerate((down, right))
        )
        cosine, sine, stretch, radius = (
            shapes[name][:, None, None] for name in ("cosine", "sine", "stretch", "radius")
        )
        along, across = (y * cosine + x * sine) * stretch, (x * cosine - y * sine) / stretch
        rectangle = shapes["rectangle"][:, None, None]
        square = jnp.maximum(jnp.abs(along), jnp.abs(across))
        inside = jnp.where(rectangle, square, jnp.sqrt(along**2 + across**2)) < radius
        # The last shape gets all pixels that no other covers. `argmax` is several times as slow.
        order = jnp.arange(_SHAPES, dtype=jnp.int32)[:, None, None]
        first = jnp.min(jnp.where(inside, order, _SHAPES - 1), axis=0)
        slope = shapes["slope"][first]
        from_center = down - shapes["center"][first, 0], right - shapes["center"][first, 1]
        shading = slope[..., 0] * from_center[0] + slope[..., 1] * from_center[1]
        image = shapes["color"][first] + jnp.clip(shading, -1, 1)[..., None]
        image = jax.nn.sigmoid(image if channels == 3 else image.mean(-1, keepdims=True))
        image = image.reshape(height, 2, width, 2, channels).mean((1, 3))
        return (image - 0.5) / 0.25 if channels == 3 else image

    draw = np.random.default_rng([0, *shape])
    each = (count, _SHAPES)
    deviations = np.array([1.7, 0.43, 0.2])
    angle = draw.uniform(0, np.pi, each)
    spread = draw.uniform(largest**-2, smallest**-2, each)
    tint = draw.normal(size=(count, 1, 3)) * 0.6 + draw.normal(size=(*each, 3))
    shapes = {
        "center": draw.uniform(-largest, np.array([2 * height, 2 * width]) + largest, (*each, 2)),
        "cosine": np.cos(angle),
        "sine": np.sin(angle),
        "stretch": np.exp(0.4 * draw.normal(size=each)),
        "radius": spread**-0.5,
        "rectangle": draw.random(each) < 0.5,
        "slope": 0.02 * draw.normal(size=(*each, 2)),
        "color": tint * deviations @ OPPONENT,
    }
    single = {
        name: value if value.dtype == bool else value.astype(np.float32)
        for name, value in shapes.items()
    }
    return np.asarray(jax.jit(functools.partial(jax.lax.map, paint))(single))


def _contrast(patches: Any, numpy: Any) -> Any:
    """Normalizes patches along the last axis to mean 0 and variance about 1."""
    centered = patches - patches.mean(-1, keepdims=True)
    return centered / numpy.sqrt((centered**2).mean(-1, keepdims=True) + _CONTRAST)


def _whitening(
    values: np.ndarray, ridge: float, *, relative: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of the rows and the symmetric (covariance + ridge)^-1/2."""
    variances, directions = np.linalg.eigh(np.cov(values.T))
    added = ridge * variances[-1] if relative else ridge
    root = directions / np.sqrt(np.maximum(variances, 0) + added) @ directions.T
    return values.mean(0).astype(np.float32), root.astype(np.float32)


def _cells(side: int, grid: int) -> np.ndarray:
    """Returns weights (grid, side) that average `side` positions over `grid` cells."""
    starts, ends = (
        np.arange(grid)[:, None] * side / grid,
        np.arange(1, grid + 1)[:, None] * side / grid,
    )
    places = np.arange(side)
    overlap = np.minimum(ends, places + 1) - np.maximum(starts, places)
    return np.maximum(overlap, 0) * grid / side
