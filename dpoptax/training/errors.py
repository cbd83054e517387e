"""Errors that a user can fix; the command line prints them without a traceback."""

import difflib
import traceback
from collections.abc import Iterable

_SHORT = 10
"""Up to so many names are listed even if one of them is likely meant."""
_LONG = 64
"""More names than this are never listed in full."""

IN_EXPERIMENTS = {
    "dataset": (
        *("mnist", "fashion_mnist", "cifar10", "cifar100", "imagenet"),
        *("sst2", "qnli", "mnli", "qqp", "e2e", "dart"),
    ),
    "model": (
        *("cnn_2", "cnn_5", "tanh_cnn", "tanh_cnn_mnist", "tanh_cnn_features"),
        *("resnet_3", "resnet_18", "resnet_50", "efficientnet_b0", "wrn_16_4"),
        *("vit_tiny", "vit_small", "vit_small_16", "vit_small_published"),
        *("roberta_base", "roberta_large", "gpt2"),
    ),
}
"""Names by field that the repository's folder `experiments` defines. It is not installed."""


class ConfigError(ValueError):
    """Raised for a value of a config or of the command line; the message names a remedy."""


def unknown_name(field: str, value: object, available: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name, with the nearest known one or a list of all."""
    if value in IN_EXPERIMENTS.get(field, ()):
        return ConfigError(
            f"{field}={value!r} is defined in the repository's folder `experiments`, which is not "
            "installed. In a checkout of the repository, let the config file return an "
            "`experiments.config.ExperimentConfig`"
        )
    names = sorted(available)
    near = difflib.get_close_matches(str(value), names, n=1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    if near and len(names) > _SHORT:
        listed = ""
    elif len(names) <= _LONG:
        listed = f"; available: {', '.join(names)}"
    else:
        listed = f"; {len(names)} are available, such as {', '.join(names[:3])}"
    return ConfigError(f"{field}={value!r} is unknown{listed}{meant}")


def line_in(path: str, error: BaseException) -> str:
    """Returns the last line of a file that an error went through, as ", line N", or ""."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f", line {lines[-1]}" if lines else ""
