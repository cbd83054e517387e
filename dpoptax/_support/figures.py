"""Imports matplotlib, an optional dependency, where a figure is drawn."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(**options: Any) -> "Figure":
    """Returns an empty figure; options as for `matplotlib.figure.Figure`.

    Raises:
      ImportError: matplotlib, a dependency of `dpoptax[train]`, is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            f"`plot` needs {error.name}, which is not installed. Run "
            "`pip install 'dpoptax[train]'`."
        ) from error
    return Figure(layout="constrained", **options)
