"""The names of the studies, for help, which does not wait for what computes them."""

NAMES = (
    "filters",
    "geodp-noise",
    "geodp-beta",
    "kalman-gain",
    "noisy-regression",
    "correlated-noise",
    "release-cosines",
    "geodp-mnist",
)
