"""Lists the names of the studies, for help texts that do not import the studies."""

NAMES = (
    "filters",
    "geodp-noise",
    "geodp-beta",
    "kalman-gain",
    "noisy-regression",
    "release-cosines",
    "geodp-mnist",
)
