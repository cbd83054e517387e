"""Trains your own model with `fit`, or the model of a config."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpoptax.training.fitting import FitResult as FitResult
    from dpoptax.training.fitting import fit as fit
else:

    def __getattr__(name: str) -> Any:
        if name in ("fit", "FitResult"):  # lazy: the command line does not need orbax
            return getattr(importlib.import_module("dpoptax.training.fitting"), name)
        raise AttributeError(f"module 'dpoptax.training' has no attribute {name!r}")
