"""Computes the sum of clipped per-example gradients without forming each gradient.

`sums.ghost_clipped_sum.ghost_clipped_sum` is the entry point. Imports go one way:

- `trace` reads the traced loss and finds operations that combine parameters with data.
- `passes` runs the loss forward and backward, and records operands and cotangents.
- `norms` bounds the norms of per-example gradients from these factors.
- `plan` chooses, for each parameter, how its norms and its sum are computed.
- `sums` scales, clips and adds the gradients.

`docs/developers/ghost-clipping.md` follows one dense layer through all stages.
"""
