"""Imports jax_privacy, an optional dependency."""

import importlib
from types import ModuleType


def jax_privacy_module(name: str) -> ModuleType:
    """Returns a module of jax_privacy.

    Raises:
      ImportError: jax_privacy, a dependency of `dpoptax[matrix]`, is not installed.
    """
    try:
        return importlib.import_module(f"jax_privacy.{name}")
    except ImportError as error:
        raise ImportError(
            "Correlated noise needs jax_privacy, which is not installed. Run "
            "`pip install 'dpoptax[matrix]'`."
        ) from error
