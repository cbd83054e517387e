"""Trains your own model with `fit`, or the task of a config.

The names of this module, `dpoptax.training.data` and `dpoptax.training.hosts` are public. The files
that they come from are not.
"""

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
    from dpoptax.runs import lazy_names

    _imported, __dir__, __all__ = lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        with explains_missing(f"{__name__}.{name}", "'dpoptax[train]'"):
            return _imported(name)
