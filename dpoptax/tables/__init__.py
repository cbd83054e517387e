"""Large tables of which a step touches few rows: memory and time with the rows, not the table.

The gradient of an embedding table is zero in all rows that no example looked up; the noise of
DP-SGD is not. So all rows are clipped, noised and written, in every step. They need not be where
the rows that take part are public. Three ways to make them so:

* a vocabulary that is public: the values of its rows, `take_rows(table, rows)`, are the parameter,
  and the batch holds `locate(lookups, rows, table)`;
* a vocabulary that is selected once, with noise, by `select_rows` (DP-FEST), and goes on the same
  way; with any clip, noise, method and optimizer;
* rows that are selected in each step, with noise, from the batch itself (DP-AdaFEST):
  `row_selecting_clip`, `row_selecting_noise` and `selected_grad`.

In all of them the loss reads the table by `look_up(table, lookups)`, with the whole table too.
Rows that just happen to be in the batch are private: to noise these alone would show who is there.

Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
Models", 2023.
"""

from dpoptax.tables._lookups import Located as Located
from dpoptax.tables._lookups import apply_updates as apply_updates
from dpoptax.tables._lookups import locate as locate
from dpoptax.tables._lookups import look_up as look_up
from dpoptax.tables._lookups import put_rows as put_rows
from dpoptax.tables._lookups import take_rows as take_rows
from dpoptax.tables._row_selecting_noise import RowSelectingNoiseState as RowSelectingNoiseState
from dpoptax.tables._row_selecting_noise import SelectedRows as SelectedRows
from dpoptax.tables._row_selecting_noise import row_selecting_noise as row_selecting_noise
from dpoptax.tables._row_selection import RowSelectingClip as RowSelectingClip
from dpoptax.tables._row_selection import RowSelection as RowSelection
from dpoptax.tables._row_selection import row_selecting_clip as row_selecting_clip
from dpoptax.tables._selected_grad import SelectedGrad as SelectedGrad
from dpoptax.tables._selected_grad import selected_grad as selected_grad
from dpoptax.tables._updates import rowwise_adagrad as rowwise_adagrad
from dpoptax.tables._vocabulary import Vocabulary as Vocabulary
from dpoptax.tables._vocabulary import select_rows as select_rows
