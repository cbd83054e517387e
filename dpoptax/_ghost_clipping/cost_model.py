"""Chooses the method for a norm, by measured costs of memory and arithmetic."""

import math
from typing import NamedTuple

from dpoptax._ghost_clipping.precision import is_precise


class CostModel(NamedTuple):
    """Holds the costs of memory relative to arithmetic.

    The costs only decide between equivalent methods. The clipping bound holds for each, but on a
    machine with other costs, the chosen method may be slower. The unit of cost is one multiply-add.

    Attributes:
      kept_entry: cost of an entry of a formed gradient that is written once and read twice.
      formed_share: cost of an entry that is only read once, as a share of `kept_entry`.
      factor_entry: cost of an entry of a factor, which is measured and divided.
      cached_entries: entries that stay in a cache; smaller gradients may be kept at any size ratio.
      memory_ratio: how many times slower inner products must be before a gradient that is larger
        than its factors is kept. It applies to several gradient points.
      stored_entries: larger factors are stored, since norm and sum would each compute them again.
      formed_entries: entries of gradients that are formed at once and then discarded.
      bundled_entries: smaller formed gradients share one array, since many arrays compile slowly.
    """

    kept_entry: int = 120
    formed_share: float = 0.75
    factor_entry: int = 40
    cached_entries: int = 2**16
    memory_ratio: float = 1.5
    stored_entries: int = 2**23
    formed_entries: int = 2**22
    bundled_entries: int = 2**10


COSTS = CostModel()
"""The model for every platform, tuned by hand on one x86 CPU.

The choices are clear-cut. With memory at a quarter or at twelve times this cost, at most one
parameter of ResNet-18, ViT-S or GPT-2 at 1,024 tokens gets another method
(`tests/benchmarks/tpu_test.py`). Twelve is the ratio for a chip of TPU v5e: 1,440 multiply-adds in
the time of three passes over an entry.
"""


def choose_method(
    examples: int, positions: int, rows: int, columns: int, *, segments: int, fixed: int = 0
) -> str:
    """Chooses the cheapest precise method for the norm of products with `positions` = Σ_s L_s.

    The factors are dense. Gradients that are formed and kept are measured without error, others
    only if this is precise enough. There may be `fixed` additional terms with arrays that depend on
    the parameters, one for each point. The method of inner products then needs the inner product of
    each array with all products, which costs as much as the sum. If the gradient with respect to
    the parameter is formed, it is formed point by point, and kept.

    Returns:
      "outer" (one position: the product of two norms), "gram" (inner products), "form" (form the
      gradients, and contract again for the sum) or "keep" (form the gradients, and keep them for
      the sum).
    """
    if positions == 1 and segments == 1:
        return "outer"
    size, work, formed = rows * columns, positions * rows * columns, max(1, fixed)
    # Inner products are symmetric in pairs of segments, so about half of them are computed.
    pairs = positions**2 * (segments + 1) / (2 * segments)
    memory = COSTS.kept_entry * size
    factors = COSTS.factor_entry * positions * (rows + columns)
    cost = {}
    if is_precise("gram", positions, rows, columns):
        cost["gram"] = factors + pairs * (rows + columns) + (1 + fixed) * work
    if not fixed and is_precise("form", positions, rows, columns):
        cost["form"] = factors + 2 * work + COSTS.formed_share * memory
    kept = work + formed * memory
    small = (
        formed * size <= 2 * positions * (rows + columns) or examples * size <= COSTS.cached_entries
    )
    several = fixed > 1 and cost.get("gram", math.inf) > COSTS.memory_ratio * kept
    if small or several or not cost:
        cost["keep"] = kept
    return min(cost, key=cost.__getitem__)
