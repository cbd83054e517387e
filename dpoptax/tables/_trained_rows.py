"""The object that a loss gets instead of a table with selected rows."""

from typing import NoReturn

import jax

UNSUPPORTED_USE = (
    "The loss must read the table only by `dpoptax.tables.look_up(table, lookups)`. Other uses, "
    "such as tied softmax weights, a norm of the whole table, or ids from elsewhere, have a "
    "gradient in all rows. Train the whole table with `dpoptax.clipped_grad`, use separate "
    "parameters for the other use, or select a vocabulary once with `dpoptax.tables.select_rows`."
)


class TrainedRows:
    """Substitute for the table in the loss of `selected_grad`, only for `look_up`."""

    def __init__(self, values: jax.Array) -> None:
        self.values = values

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(UNSUPPORTED_USE)

    __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __truediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Raises an error for attributes of arrays."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
