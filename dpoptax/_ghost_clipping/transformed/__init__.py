"""Handles parameters that are transformed before they meet data.

A network without weight standardization or merged adapters does not need this folder.
Let `y = x @ k` with a kernel `k = f(w)`, for example standardized. Then the types are:

- `CotangentSum`: the gradient of `k`, and then of `w`: outer products and fixed terms.
- `OuterSum`: Σ_t rows_tᵀ columns_t times an array that depends on `w` only.
- `FixedTerm`: an array that depends on `w` only, times a few numbers of each example.
- `MeasuredTerm`: a `FixedTerm` with its inner products, from which norms follow.
- `PullBackCounts`: how many of them there will be, for the plan.
"""
