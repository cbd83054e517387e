"""What a loss gets in the place of a table of which rows were selected for the sum."""

from typing import NoReturn

import jax

UNSUPPORTED_USE = (
    "the loss uses a table of which some rows were selected other than by "
    "dpoptax.tables.look_up(table, lookups). A table that is used a second time, such as tied "
    "weights of a softmax, a norm of the whole table, or ids from elsewhere, has a gradient by all "
    "of its rows: train it whole with dpoptax.clipped_grad, give the second use parameters of its "
    "own, or select a vocabulary once with dpoptax.tables.select_rows, whose rows are all there"
)


class TrainedRows:
    """What stands in the place of a table in the loss of `selected_grad`: for `look_up` alone."""

    def __init__(self, values: jax.Array) -> None:
        self.values = values

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(UNSUPPORTED_USE)

    __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __truediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Attributes of arrays, which it has none of."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
