"""Trains your own model with `fit`, or the task of a config.

The names of this module, `dpoptax.training.data` and `dpoptax.training.hosts` are public. The files
that they come from are not.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpoptax.training.errors import explains_missing

if TYPE_CHECKING:
    from dpoptax.training.classifier import CNN as CNN
    from dpoptax.training.classifier import MLP as MLP
    from dpoptax.training.classifier import classification as classification
    from dpoptax.training.config import Config as Config
    from dpoptax.training.config import config_of as config_of
    from dpoptax.training.config import load_config as load_config
    from dpoptax.training.config import load_configs as load_configs
    from dpoptax.training.data.dataset import Dataset as Dataset
    from dpoptax.training.data.dataset import Split as Split
    from dpoptax.training.errors import ConfigError as ConfigError
    from dpoptax.training.evaluation import Evaluation as Evaluation
    from dpoptax.training.fitting import fit as fit
    from dpoptax.training.parameters import load_params as load_params
    from dpoptax.training.parameters import save_params as save_params
    from dpoptax.training.run.averaging import average_params as average_params
    from dpoptax.training.run.run_task import FitResult as FitResult
    from dpoptax.training.search.compare import compare as compare
    from dpoptax.training.search.comparison import Comparison as Comparison
    from dpoptax.training.several_fits import FitRuns as FitRuns
    from dpoptax.training.several_fits import fit_runs as fit_runs
    from dpoptax.training.task import PlainPlan as PlainPlan
    from dpoptax.training.task import Task as Task
    from dpoptax.training.train_config import train_and_evaluate as train_and_evaluate
else:
    # Imported on first use: the command line does not need orbax, and `fit` needs no config.
    _FILES = {
        "classifier": ("CNN", "MLP", "classification"),
        "config": ("Config", "config_of", "load_config", "load_configs"),
        "data.dataset": ("Dataset", "Split"),
        "errors": ("ConfigError",),
        "evaluation": ("Evaluation",),
        "fitting": ("fit",),
        "train_config": ("train_and_evaluate",),
        "parameters": ("load_params", "save_params"),
        "run.averaging": ("average_params",),
        "run.run_task": ("FitResult",),
        "search.compare": ("compare",),
        "search.comparison": ("Comparison",),
        "several_fits": ("FitRuns", "fit_runs"),
        "task": ("PlainPlan", "Task"),
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
