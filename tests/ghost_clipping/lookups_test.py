"""Tests that every kind of table lookup is recognized and equals per-example gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpoptax
from tests.ghost_clipping.comparison import both, close
from tests.helpers import global_norm, normal, slow_but
from tests.networks import Network

pytestmark = pytest.mark.usefixtures("no_room")

# In range, negative, and outside the table on both sides, near and far.
_IDS = jnp.array([[0, 12, 2, 2], [1, -14, 3, -2], [-1, 0, 11, 6], [4, 5, 0, 40], [3, 3, 3, -40]])
_MODES = ("clip", "drop", "fill", "promise_in_bounds")


def _gather(mode, *, offset, indexed, sizes, collapsed=()):
    """Returns `lax.gather` for indices (…, components) along the axes `indexed`."""
    numbers = lax.GatherDimensionNumbers(offset, collapsed, indexed)

    def read(table, indices):
        return lax.gather(table, indices, numbers, sizes, mode=mode, fill_value=0.5)

    return read


def _with_zeros(ids, place):
    """Returns two-component indices whose other component is mostly 0."""
    zeros = jnp.where(ids == 3, 1, 0)
    return jnp.stack([ids, zeros] if place == 0 else [zeros, ids], axis=-1)


# For a table of shape (12, 6) and indices of shape (4,).
_READS = {
    "an equinox embedding": lambda t, i: jax.vmap(lambda i: t[i])(i),
    "rows with a colon": lambda t, i: jax.vmap(lambda i: t[i, :])(i),
    "columns": lambda t, i: jax.vmap(lambda i: t[:, i])(i),
    "columns side by side": lambda t, i: jax.vmap(lambda i: t[:, i], out_axes=1)(i),
    "nested": lambda t, i: jax.vmap(jax.vmap(lambda i: t[i]))(i.reshape(2, 2)),
    "nested, columns": lambda t, i: jax.vmap(jax.vmap(lambda i: t[:, i], out_axes=1))(
        i.reshape(2, 2)
    ),
    "a vmap over lookups": lambda t, i: jax.vmap(lambda i: t[:, i])(i.reshape(2, 2)),
    "take": lambda t, i: jax.vmap(lambda i: jnp.take(t, i, axis=0))(i),
    "take columns": lambda t, i: jax.vmap(lambda i: jnp.take(t, i, axis=-1))(i),
    "take columns, clipped": lambda t, i: jax.vmap(lambda i: jnp.take(t, i, 1, mode="clip"))(i),
    "take, wrapped": lambda t, i: jax.vmap(lambda i: jnp.take(t, i, axis=0, mode="wrap"))(i),
    "dynamic index": lambda t, i: jax.vmap(lambda i: lax.dynamic_index_in_dim(t, i, 0))(i),
    "dynamic index of columns": lambda t, i: jax.vmap(
        lambda i: lax.dynamic_index_in_dim(t, i, 1, keepdims=False)
    )(i),
    "one column, once": lambda t, i: lax.dynamic_slice_in_dim(t, i[1], 1, axis=1),
    "a table of one row": lambda t, i: jax.vmap(lambda i: t[:1][i])(i),
    "a table of one column": lambda t, i: jax.vmap(lambda i: t[:, :1][i])(i),
    "entries of a vector": lambda t, i: jax.vmap(lambda i: t.ravel()[i])(i),
    "rows of a turned table": lambda t, i: jax.vmap(lambda i: t.T[i])(i),
    "rows that are blocks": lambda t, i: jax.vmap(lambda i: t.reshape(12, 2, 3)[i])(i),
    "middle axis": lambda t, i: jax.vmap(lambda i: t.reshape(12, 2, 3)[:, i])(i),
    "stacked tables": lambda t, i: jax.vmap(lambda t, i: t[i])(t.reshape(2, 12, 3), i[:2]),
    "stacked tables, clipped": lambda t, i: jax.vmap(lambda t, i: t.at[i].get(mode="clip"))(
        t.reshape(2, 12, 3), i.reshape(2, 2)
    ),
    "tables stacked behind": lambda t, i: jax.vmap(
        lambda t, i: t.at[:, i].get(mode="fill", fill_value=0.5), in_axes=(2, 1), out_axes=1
    )(t.reshape(12, 3, 2), i.reshape(2, 2)),
    "in a scan": lambda t, i: lax.scan(
        lambda c, i: (c, jax.vmap(lambda i: t[i])(i)), 0, i.reshape(2, 2)
    )[1],
    "narrow indices": lambda t, i: jax.vmap(lambda i: t[i])(i.astype(jnp.uint8)),
}  # fmt: skip


def _by_mode(mode):
    """Returns reads whose results outside the table depend on the mode."""
    return {
        "rows": lambda t, i: jax.vmap(lambda i: t.at[i].get(mode=mode))(i),
        "columns": lambda t, i: jax.vmap(lambda i: t.at[:, i].get(mode=mode))(i),
        "axis kept": lambda t, i: _gather(mode, offset=(1, 2), indexed=(0, 1), sizes=(1, 6))(
            t, _with_zeros(i, 0)
        ),
        "components turned": lambda t, i: _gather(
            mode, offset=(1,), indexed=(1, 0), sizes=(1, 6), collapsed=(0,)
        )(t, _with_zeros(i, 1)),
    }


_KINDS = {"any": _READS} | {mode: _by_mode(mode) for mode in _MODES}
# Reads by index, by slice, of parts and of stacked tables, and indices outside in every mode.
_QUICK = {
    name: _READS[name]
    for name in (
        "columns side by side", "take, wrapped", "one column, once", "a table of one row",
        "tables stacked behind", "in a scan",
    )
} | {
    f"{mode}, {name}": _by_mode(mode)[name]
    for mode in ("clip", "drop", "fill")
    for name in ("rows", "components turned")
}  # fmt: skip


def _loss(reads):
    def loss(tables, ids):
        rows = [read(tables[name], ids).ravel() for name, read in reads.items()]
        rows = jnp.nan_to_num(jnp.concatenate(rows), nan=0.5)
        return jnp.sum(jnp.sin(rows * jnp.linspace(0.5, 2.0, rows.size)))

    return loss


def _tables(reads):
    return {name: normal(i, (12, 6)) for i, name in enumerate(reads)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_reads_are_recognized_as_lookups(kind):
    reads = _KINDS[kind]
    rows = dpoptax.explain(_loss(reads), _tables(reads), _IDS[0]).rows
    assert {row.parameter: row.why for row in rows if row.uses != "lookup" or row.why} == {}


@pytest.mark.parametrize("kind", ["quick", *slow_but((), _KINDS)])
def test_lookups_equal_per_example_gradients(kind):
    reads = _QUICK if kind == "quick" else _KINDS[kind]
    points = dpoptax.gradient_points((), _tables(reads))
    close(*both(Network(_loss(reads), None, None), dpoptax.normalized_clip(0.5), points, _IDS))


def test_example_moves_sum_by_at_most_the_bound():
    names = ("columns", "one column, once", "stacked tables")

    def loss(tables, ids):
        return sum(1e3 * jnp.sum(jnp.sin(_READS[name](tables[name], ids))) for name in names)

    tables = {name: normal(i, (12, 6)) for i, name in enumerate(names)}
    grad_fn = jax.jit(dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0)))
    points, mask = dpoptax.gradient_points((), tables), np.ones(len(_IDS), bool)
    total = grad_fn(points, _IDS, mask).sum
    for i in range(len(_IDS)):
        rest = grad_fn(points, _IDS, mask & (np.arange(len(_IDS)) != i)).sum
        assert 0.9 < global_norm(jax.tree.map(jnp.subtract, total, rest)) <= 1.0


def test_windows_of_rows_fall_back():
    def loss(params, start):
        return jnp.sum(jnp.sin(lax.dynamic_slice_in_dim(params, start, 20)))

    (row,) = dpoptax.explain(loss, jnp.ones(100), jnp.array(3)).fallbacks
    assert row.why == "meets data in dynamic_slice"
