"""Lists published accuracies of private training, on MNIST and CIFAR-10."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Published:
    """An accuracy that a paper states.

    Attributes:
        dataset: Name of the data set.
        epsilon: ε, at the paper's own δ, at most 1/N.
        accuracy: Test accuracy in %.
        what: Model or method.
        source: The paper, and the place in it if it has several numbers.
    """

    dataset: str
    epsilon: float
    accuracy: float
    what: str
    source: str


_TB = "Tramèr and Boneh, 2021"
_PMLF = "DP-PMLF, Table 3 (ResNet-18)"
PUBLISHED = (
    Published("mnist", 3.0, 98.7, "scattering + linear", _TB),
    Published("mnist", 2.93, 98.1, "tanh CNN", "Papernot et al., 2021"),
    Published("mnist", 1.0, 89.01, "DP-SGD", _PMLF),
    Published("mnist", 8.0, 89.03, "DP-SGD", _PMLF),
    Published("mnist", 1.0, 92.03, "Inner-outer", _PMLF),
    Published("mnist", 8.0, 92.46, "Inner-outer", _PMLF),
    Published("mnist", 1.0, 92.04, "DP-PMLF", _PMLF),
    Published("mnist", 8.0, 92.38, "DP-PMLF", _PMLF),
    Published("cifar10", 3.0, 67.0, "scattering + linear", _TB),
    Published("cifar10", 3.0, 69.3, "scattering + CNN", _TB),
    Published("cifar10", 3.0, 59.2, "tanh CNN", _TB),
    Published("cifar10", 7.53, 66.2, "tanh CNN", "Papernot et al., 2021"),
    Published("cifar10", 1.93, 58.6, "all batch", "Dörmann et al., 2021"),
    Published("cifar10", 4.21, 66.4, "all batch", "Dörmann et al., 2021"),
    Published("cifar10", 7.42, 70.1, "all batch", "Dörmann et al., 2021"),
    Published("cifar10", 1.0, 56.8, "WRN-16-4, augmented", "De et al., 2022"),
    Published("cifar10", 8.0, 81.4, "WRN-40-4, augmented", "De et al., 2022"),
    Published("cifar10", 1.0, 72.3, "pretrained on procedural images", "DP-RandP, 2023"),
    Published("cifar10", 2.0, 68.8, "DiSK", "DiSK, Table 6 (CNN)"),
    Published("cifar10", 1.0, 41.61, "DP-SGD", _PMLF),
    Published("cifar10", 8.0, 51.98, "DP-SGD", _PMLF),
    Published("cifar10", 1.0, 47.95, "DP-PMLF", _PMLF),
    Published("cifar10", 8.0, 58.27, "DP-PMLF", _PMLF),
)
