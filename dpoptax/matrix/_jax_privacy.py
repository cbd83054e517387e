"""jax_privacy, which is optional, where it is asked for."""

import importlib
from types import ModuleType


def jax_privacy_module(name: str) -> ModuleType:
    """A module of jax_privacy, or an error that says what to install."""
    try:
        return importlib.import_module(f"jax_privacy.{name}")
    except ImportError as error:
        raise ImportError(
            "correlated noise needs jax_privacy, which is not installed; "
            "pip install 'dpoptax[matrix]'"
        ) from error
