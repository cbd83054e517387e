"""Trains your own model with `fit`, or the model of a config.

The names of this module, `dpoptax.training.data`, `dpoptax.training.hosts` and
`dpoptax.training.methods` are public.
The files that they come from are not.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpoptax.training.errors import explains_missing

if TYPE_CHECKING:
    from dpoptax.training.config import TrainConfig as TrainConfig
    from dpoptax.training.config import load_config as load_config
    from dpoptax.training.config import load_configs as load_configs
    from dpoptax.training.data.dataset import Dataset as Dataset
    from dpoptax.training.data.dataset import Split as Split
    from dpoptax.training.data.dataset import load_dataset as load_dataset
    from dpoptax.training.data.dataset import register_dataset as register_dataset
    from dpoptax.training.errors import ConfigError as ConfigError
    from dpoptax.training.fitting import FitResult as FitResult
    from dpoptax.training.fitting import fit as fit
    from dpoptax.training.loop import train as train
    from dpoptax.training.loop import train_and_evaluate as train_and_evaluate
    from dpoptax.training.methods.method import Method as Method
    from dpoptax.training.models import FunctionModel as FunctionModel
    from dpoptax.training.models import register_model as register_model
    from dpoptax.training.search.compare import Comparison as Comparison
    from dpoptax.training.search.compare import compare as compare
    from dpoptax.training.several_fits import FitRuns as FitRuns
    from dpoptax.training.several_fits import fit_runs as fit_runs
else:
    # Imported on first use: the command line does not need orbax, and `fit` needs no config.
    _FILES = {
        "config": ("TrainConfig", "load_config", "load_configs"),
        "data.dataset": ("Dataset", "Split", "load_dataset", "register_dataset"),
        "errors": ("ConfigError",),
        "fitting": ("FitResult", "fit"),
        "loop": ("train", "train_and_evaluate"),
        "methods.method": ("Method",),
        "models": ("FunctionModel", "register_model"),
        "search.compare": ("Comparison", "compare"),
        "several_fits": ("FitRuns", "fit_runs"),
    }
    _FILE_OF = {name: file for file, names in _FILES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in _FILE_OF:
            with explains_missing(f"{__name__}.{name}", "'dpoptax[train]'"):
                return getattr(importlib.import_module(f"{__name__}.{_FILE_OF[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    __all__ = sorted(_FILE_OF)

    def __dir__() -> list[str]:
        return __all__
