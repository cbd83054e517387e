"""Dictionary features computed patch by patch, slowly and in float64."""

import numpy as np


def responses(image, *, filters, mean, size, contrast, threshold):
    """Returns max(±D V (p̂ − m) − α, 0) at each position, (rows, columns, 2, filters)."""
    height, width, _ = image.shape
    found = np.zeros((height - size + 1, width - size + 1, 2, filters.shape[1]))
    for down in range(height - size + 1):
        for right in range(width - size + 1):
            patch = image[down : down + size, right : right + size].astype(float).ravel()
            patch = (patch - patch.mean()) / np.sqrt(patch.var() + contrast)
            response = (patch - mean) @ filters
            found[down, right] = np.maximum([response - threshold, -response - threshold], 0)
    return found


def means(found, grid):
    """Averages over `grid` × `grid` cells of equal size; positions on a border count in parts."""
    fine = found.repeat(grid, 0).repeat(grid, 1)  # so that cells divide evenly
    down, right = found.shape[:2]
    cells = fine.reshape(grid, down, grid, right, *found.shape[2:])
    return cells.mean((1, 3))


def features(image, *, grid, center, whitening, **rest):
    """Returns the mean features of an image and its mirror image, whitened, of mean square 1."""
    both = [means(responses(side, **rest), grid) for side in (image, image[:, ::-1])]
    flat = np.mean(both, axis=0).reshape(grid, grid, -1)
    flat = (flat - center) @ whitening
    return flat / np.sqrt(np.mean(flat**2))
