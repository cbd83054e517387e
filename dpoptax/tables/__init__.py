"""Large tables, with few trained rows in each step.

The gradient of an embedding table is zero in rows that no example looks up, but DP-SGD adds noise
to all rows. If the trained rows are public, time and memory depend only on these rows. There are
three ways to make them public:

* a public vocabulary. The parameter is `take_rows(table, rows)`, and the batch holds
  `locate(lookups, rows, table)`;
* a vocabulary that `select_rows` selects once, with noise (DP-FEST), and that is then used in the
  same way. Both work with any clip, noise, method and optimizer;
* rows that each step selects from its batch, with noise (DP-AdaFEST), by `row_selecting_clip`,
  `row_selecting_noise` and `selected_grad`.

In each case, and also with the whole table, the loss reads the table by `look_up(table, lookups)`.
The rows that occur in a batch are private: adding noise only to these would reveal its examples.

Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
Models", 2023.
"""

from dpoptax.tables._lookups import (
    Located,
    apply_updates,
    locate,
    look_up,
    put_rows,
    rowwise_adagrad,
    take_rows,
)
from dpoptax.tables._row_selecting_noise import (
    RowSelectingNoiseState,
    SelectedRows,
    row_selecting_noise,
)
from dpoptax.tables._row_selection import RowSelectingClip, RowSelection, row_selecting_clip
from dpoptax.tables._selected_grad import SelectedGrad, selected_grad
from dpoptax.tables._vocabulary import Vocabulary, select_rows

__all__ = [
    "Located", "RowSelectingClip", "RowSelectingNoiseState", "RowSelection", "SelectedGrad",
    "SelectedRows", "Vocabulary", "apply_updates", "locate", "look_up", "put_rows",
    "row_selecting_clip", "row_selecting_noise", "rowwise_adagrad", "select_rows", "selected_grad",
    "take_rows",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
