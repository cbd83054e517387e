"""Tests of the analysis of batch rows: rows reported as separate do not depend on each other.

Each function gets a batch with one row per example. Where the analysis reports that a row of the
result belongs to one example, the others are changed, also to NaN. The row must stay equal bit for
bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from dpoptax._information_flow.entry_facts import DISTINCT_FACTS
from dpoptax._information_flow.example_axes import LEADING_AXIS
from dpoptax._information_flow.label_follower import LabelFollower
from dpoptax._information_flow.labels import Content, Label
from tests.helpers import slow_but

ROWS = 6
W = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
KERNEL = jnp.linspace(-1.0, 1.0, 3 * 3 * 2 * 5).reshape(3, 3, 2, 5)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(ROWS, 8, 4)), jnp.float32),
        jnp.asarray(rng.integers(0, 4, ROWS), jnp.int32),
        jnp.asarray(rng.normal(size=(ROWS, 6, 6, 2)), jnp.float32),
    )


def labels_of(fn, *given, public=()):
    """Returns the labels of the results; public arguments come first."""
    traced = jax.make_jaxpr(fn)(*public, *given)
    labels = [
        Label(number=("argument", i), entries=DISTINCT_FACTS)
        for i in range(len(jax.tree.leaves(public)))
    ]
    labels += [Label(Content.PRIVATE, LEADING_AXIS) for _ in jax.tree.leaves(given)]
    return LabelFollower({}).follow(traced.jaxpr, labels)


def convolved(x, kernel, **options):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims, **options)


def cnn(w, x):
    x = jnp.tanh(convolved(x[None], w))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(x**2)


def grouped(w, x):
    return jnp.sum(convolved(x[None], w, feature_group_count=2) ** 3)


def recurrent(w, x):
    def turn(h, row):
        return jnp.tanh(row @ w + h), h

    last, all_of_them = lax.scan(turn, jnp.zeros(3), x)
    return jnp.sum(last) + jnp.sum(all_of_them**2)


def attention(w, x):
    q, k = x @ w, jnp.sin(x @ w)
    return jnp.sum(jax.nn.softmax(q @ k.T, axis=-1) @ k)


def classified(w, x, label):
    return optax.softmax_cross_entropy_with_integer_labels((x @ w).mean(0), label % 3)


def looked_up(table, x, label):
    return jnp.sum(jnp.tanh(table[label]) * x[0, :3]) + jnp.sum(table[(x[:, 0] > 0).astype(int)])


def sorted_and_chosen(w, x):
    top, _ = lax.top_k(jnp.sort(x.sum(1)), 2)
    return jnp.sum(top) + jnp.max(jnp.cumsum(x @ w, 0)) + x[jnp.argmax(x[:, 0]), 0]


def solved(w, x):
    root = jnp.linalg.cholesky(x.T @ x + jnp.eye(4))
    return jnp.sum(lax.linalg.triangular_solve(root, w, left_side=True, lower=True))


def chosen(w, x):
    return lax.cond(x[0, 0] > 0, lambda: jnp.sum(x @ w), lambda: 0.0)


def spectral(w, x):
    return jnp.sum(jnp.abs(jnp.fft.rfft(x, axis=0)) ** 2) + jnp.sum(w) * x[0, 0]


def dropped(w, x):
    key = jax.random.fold_in(jax.random.key(0), lax.bitcast_convert_type(x[0, 0], jnp.int32))
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) @ w)


def updated(w, x):
    y = x.at[2:4].add(1.0).at[:, 1].set(jnp.sum(w))
    return jnp.sum(lax.dynamic_update_slice(y, y[:2] ** 2, (1, 0)) ** 2)


def grads(loss, *which):
    def of_batch(w, *data):
        given = [data[i] for i in which]
        return jax.vmap(jax.value_and_grad(loss), (None, *(0 for _ in given)))(w, *given)

    return of_batch


OF_ONE = {
    "affine": (W, grads(lambda w, x: jnp.sum((x @ w) ** 2), 0)),
    "convolutions and pooling": (KERNEL, grads(cnn, 2)),
    "a recurrence": (jnp.ones((4, 3)) / 9, grads(recurrent, 0)),
    "attention": (W, grads(attention, 0)),
    "integer labels": (W, grads(classified, 0, 1)),
    "a table": (W, grads(looked_up, 0, 1)),
    "sorting": (W, grads(sorted_and_chosen, 0)),
    "linear systems": (W, grads(solved, 0)),
    "a choice": (W, grads(chosen, 0)),
    "a Fourier transform": (W, grads(spectral, 0)),
    "randomness of its own": (W, grads(dropped, 0)),
    "updates": (W, grads(updated, 0)),
    "checkpointing": (W, grads(jax.checkpoint(recurrent), 0)),
    "microbatches": (
        W,
        lambda w, x, *_: lax.map(lambda row: jax.grad(attention)(w, row), x, batch_size=2),
    ),
    "a loop over examples": (
        W,
        lambda w, x, *_: lax.scan(lambda c, row: (c, jax.grad(attention)(w, row)), 0, x)[1],
    ),
    "axes moved about": (
        W,
        lambda w, x, *_: jnp.moveaxis(jnp.einsum("bij,jk->kib", x, w)[::-1], 2, 0).reshape(
            ROWS, -1
        ),
    ),
    "laid out flat and back": (
        W,
        lambda w, x, *_: (x.reshape(ROWS * 8, 4) @ w).reshape(2, 3, 8 * 3).reshape(ROWS, 8, 3),
    ),
    "padded and put together": (
        W,
        lambda w, x, *_: jnp.concatenate([jnp.pad(x, ((0, 0), (1, 0), (0, 0))), 2 * x], 1)[:, 1:],
    ),
    "a loop until each is done": (
        W,
        lambda w, x, *_: jax.vmap(
            lambda r: lax.while_loop(lambda y: jnp.sum(y) > 1.0, lambda y: y / 2, r)
        )(x),
    ),
    "halves put together": (W, lambda w, x, *_: jnp.concatenate([2 * x[:2], x[2:5], x[5:]])),
    "one row subtracted from itself": (W, lambda w, x, *_: x - x.mean((1, 2), keepdims=True)),
    "a matrix for each": (W, lambda w, x, *_: jnp.einsum("bij,bkj->bik", x, x)),
    "a kernel for each": (
        KERNEL,
        lambda w, *d: jax.vmap(lambda x, k: convolved(x[None], w * k))(d[2], d[1]),
    ),
}


QUICK = (
    *("affine", "convolutions and pooling", "a table", "microbatches", "a loop over examples"),
    *("axes moved about", "padded and put together", "a matrix for each"),
)


@pytest.mark.parametrize("name", slow_but(QUICK, OF_ONE))
def test_rows_labeled_by_example_depend_on_it_alone(name):
    params, fn = OF_ONE[name]
    labels = labels_of(fn, *batch(), public=(params,))
    assert all(label.rows == LEADING_AXIS for label in labels), [label.joined for label in labels]
    found = jax.tree.leaves(jax.jit(fn)(params, *batch()))
    assert all(len(each) == ROWS for each in found)
    for other in (batch(1), jax.tree.map(lambda x: x * jnp.nan if x.ndim > 1 else x, batch())):
        for row in (0, 3, ROWS - 1):
            mixed = [y.at[row].set(x[row]) for x, y in zip(batch(), other, strict=True)]
            moved = jax.tree.leaves(jax.jit(fn)(params, *mixed))
            for one, another in zip(found, moved, strict=True):
                np.testing.assert_array_equal(one[row], another[row])


def overlapping(w, x, *_):
    """Windows that overlap the previous rows."""
    return lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), ((1, 0), (0, 0), (0, 0)))


def windows_apart(w, x, *_):
    """Windows of six rows with gaps, as many windows as rows."""
    return lax.reduce_window(
        x, 0.0, lax.add, (6, 1, 1), (1, 1, 1), "VALID", base_dilation=(2, 1, 1)
    )


def shifted(w, x, *_):
    return lax.reduce_window(x, 0.0, lax.add, (1, 1, 1), (1, 1, 1), ((1, -1), (0, 0), (0, 0)))


def in_turns(w, x, *_):
    """Different rows in each turn, side by side."""
    keys = jax.random.split(KEY, 3)
    orders = lax.scan(lambda c, key: (c, x[jax.random.permutation(key, ROWS)]), 0, keys)[1]
    return jnp.moveaxis(orders, 1, 0)


def from_other_devices(w, x, *_):
    """Processes row by row, with the row of another device in the same turn."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(part):
        def turn(carry, row):
            return carry, row + lax.ppermute(row, "data", [(0, 0)])

        return lax.scan(turn, 0, part)[1]

    rows = jax.P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)


def kernels_of_groups(w, x, label, y):
    kernels = jnp.moveaxis(y, 0, -1)[:3, :3, :, :]
    return convolved(jnp.ones((ROWS, 6, 6, 2)), kernels, batch_group_count=ROWS)[0, 0].T


OF_SEVERAL = {
    "their mean": lambda w, x, *_: x - x.mean(0),
    "running sums": lambda w, x, *_: jnp.cumsum(x, 0),
    "the row before": lambda w, x, *_: x - jnp.roll(x, 1, axis=0),
    "rows backwards": lambda w, x, *_: x[::-1],
    "rows mixed at random": lambda w, x, *_: x + x[jax.random.permutation(KEY, ROWS)],
    "rows drawn with replacement": lambda w, x, *_: x[jax.random.randint(KEY, (ROWS,), 0, ROWS)],
    "rows repeated": lambda w, x, *_: jnp.repeat(x, 2, axis=0),
    "rows repeated in turn": lambda w, x, *_: jnp.tile(x, (2, 1, 1)),
    "rows chosen by a row": lambda w, x, label, *_: x[label],
    "rows in another's order": lambda w, x, *_: x[jnp.argsort(x[:, 0, 0])],
    "sorted": lambda w, x, *_: jnp.sort(x, 0),
    "the largest": lambda w, x, *_: lax.top_k(x[:, 0, 0], ROWS)[0],
    "halves in the other order": lambda w, x, *_: jnp.concatenate([x[3:], x[:3]]),
    "halves that overlap": lambda w, x, *_: jnp.concatenate([x[:3], x[2:5]]),
    "two batches": lambda w, x, *_: jnp.concatenate([x, x]),
    "halves": lambda w, x, *_: x[:3] + x[3:],
    "pairs": lambda w, x, *_: (
        x.reshape(3, 2, 8, 4).sum(1, keepdims=True).repeat(2, 1).reshape(x.shape)
    ),
    "laid out in another order": lambda w, x, *_: x.transpose(1, 0, 2).reshape(ROWS, 8, 4),
    "products of rows": lambda w, x, *_: jnp.einsum("bij,cij->bc", x, x),
    "overlapping windows": overlapping,
    "windows apart": windows_apart,
    "windows beside rows": shifted,
    "turns of a loop": in_turns,
    "turns of several devices": from_other_devices,
    "kernels of groups of a batch": kernels_of_groups,
    "combinations": lambda w, x, *_: jnp.einsum("bij,bk->kij", x, jnp.ones((ROWS, ROWS))),
    "their sum": lambda w, x, _, y: y.sum(0),
    "a state from row to row": lambda w, x, *_: lax.scan(lambda c, r: (c + r, c), x[0], x)[1],
    "a loop until all are done": lambda w, x, *_: lax.while_loop(
        lambda y: jnp.sum(y) > 1.0, lambda y: y / 2, x
    ),
    "a decision": lambda w, x, *_: lax.cond(jnp.sum(x) > 0, lambda: x, lambda: 2 * x),
    "padding in front": lambda w, x, *_: x + jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:ROWS],
    "a Fourier transform over rows": lambda w, x, *_: jnp.fft.fft(x[:, 0], axis=0).real,
    "updates by rows": lambda w, x, label, *_: x.at[label].add(1.0 + x),
    "an operation by a host": lambda w, x, *_: jax.pure_callback(lambda y: y, x, x),
    "convolutions over rows": lambda w, x, *_: jnp.convolve(x[:, 0, 0], jnp.ones(3), "same"),
    "groups of a batch": lambda w, x, _, y: grads(grouped, 2)(KERNEL[:, :, :1, :4], x, _, y)[1],
}
KEY = jax.random.key(0)


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_mixed_rows_are_not_labeled_by_example(name):
    (label,) = labels_of(OF_SEVERAL[name], *batch(), public=(W,))
    assert label.rows is None or not label.rows.is_leading


def test_slices_of_different_lengths_join_examples():
    def summed(start, x, y):
        return lax.dynamic_slice(x, (start,), (3,)) + lax.dynamic_slice(y, (start,), (3,))

    kept, joined = (
        labels_of(summed, jnp.ones(6), jnp.ones(length), public=(jnp.uint32(2),))[0].rows
        for length in (6, 5)
    )
    assert kept.is_leading
    assert joined is None


def test_mixed_rows_of_a_scan_are_not_labeled_by_example():
    def summed(x, y):
        """Sums different examples per turn: (2, 2, 6) and (3, 2, 4), the turns in the middle."""
        parts = jnp.moveaxis(x.reshape(2, 2, 6), 1, 0), jnp.moveaxis(y.reshape(3, 2, 4), 1, 0)
        turn = lambda carry, part: (carry, part[0].reshape(3, 4) + part[1])  # noqa: E731
        return lax.scan(turn, 0, parts)[1]

    (label,) = labels_of(summed, jnp.ones(24), jnp.ones(24))
    assert label.rows is None


# Random operations on an array of any shape; `pick` chooses an integer below its argument.
def reshaped(x, pick):
    shape, rest = [], x.size
    for _ in range(3):
        divisors = [n for n in range(1, rest + 1) if rest % n == 0]
        shape.append(divisors[pick(len(divisors))])
        rest //= shape[-1]
    return x.reshape(*shape, rest)


def transposed(x, pick):
    axes = list(range(x.ndim))
    return x.transpose([axes.pop(pick(len(axes))) for _ in range(x.ndim)])


def reduced(x, pick):
    return x if x.ndim < 2 else [jnp.sum, jnp.max][pick(2)](x, axis=pick(x.ndim))


def broadcast(x, pick):
    shape = list(x.shape)
    shape.insert(axis := pick(x.ndim + 1), 2)
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


def cut(x, pick):
    axis = pick(x.ndim)
    return lax.slice_in_dim(x, 0, 1 + pick(x.shape[axis]), axis=axis)


def cut_at(x, pick):
    axis = pick(x.ndim)
    size = 1 + pick(x.shape[axis])
    return lax.dynamic_slice_in_dim(x, jnp.int32(pick(3)), size, axis=axis)


def taken(x, pick):
    axis = pick(x.ndim)
    return jnp.take(x, jax.random.permutation(KEY, x.shape[axis])[: 1 + pick(3)], axis=axis)


def multiplied(x, pick):
    axis = pick(x.ndim)
    weights = jnp.arange(x.shape[axis] * 2.0).reshape(-1, 2)
    return jnp.tensordot(x, weights, (axis, 0))


def by_itself(x, pick):
    axis = pick(x.ndim)
    moved = jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)[:, :4]
    return jnp.einsum("ai,aj->aij" if pick(2) else "ai,bi->ab", moved, jnp.cos(moved))


def in_turn(x, pick):
    return lax.scan(lambda c, row: (c + 1.0, jnp.sin(row) + c), 0.0, x)[1]


def handed_on(x, pick):
    return lax.scan(lambda c, row: (c + row, c * 2.0), jnp.zeros(x.shape[1:]), x)[pick(2)]


OPERATIONS = [
    *(reshaped, reshaped, transposed, transposed, reduced, broadcast, cut, cut_at, taken),
    *(multiplied, by_itself, in_turn, handed_on),
    lambda x, pick: jnp.flip(x, pick(x.ndim)) + pick(2) * x,
    lambda x, pick: jnp.concatenate([x, jnp.cos(x)], axis=pick(x.ndim)),
    lambda x, pick: jnp.cumsum(x, axis=pick(x.ndim)),
    lambda x, pick: jnp.sort(x, axis=pick(x.ndim)),
    lambda x, pick: x - jnp.mean(x, axis=pick(x.ndim), keepdims=True),
    lambda x, pick: jnp.pad(x, [(0, i == 0) for i in range(x.ndim)])[1:],
    lambda x, pick: x.at[..., 0].set(x[..., -1]),
]


def examples_at(rows, shape):
    """Returns, for each entry of an array, the number of its example."""
    places, number = np.indices(shape), np.zeros(shape, int)
    for digit in rows.digits:
        number = number * (shape[digit.axis] // digit.run) + places[digit.axis] // digit.run
    return number


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 90), marks=pytest.mark.slow)])
def test_row_labels_of_random_programs_are_correct(seeds):
    kept = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.normal(size=(ROWS, 2, 2)), jnp.float32)
        steps = [(OPERATIONS[rng.integers(len(OPERATIONS))], rng.integers(2**30)) for _ in range(4)]

        def program(x, steps=steps):
            for operation, choice in steps:
                own = np.random.default_rng(choice)
                x = operation(x, lambda below, own=own: int(own.integers(below)))
                x = x.ravel()[:400] if x.size > 400 else x
            return x

        (label,) = labels_of(program, x)
        if label.rows is None:
            continue
        kept += 1
        result = np.asarray(program(x))
        named = examples_at(label.rows, result.shape)
        influenced = [set() for _ in range(named.max() + 1)]
        for row in range(ROWS):
            moved = np.asarray(program(x.at[row].set(rng.normal(size=(2, 2)) + 9.0)))
            for number in np.unique(named[moved != result]):
                influenced[number].add(row)
        assert all(len(each) <= 1 for each in influenced), steps
        if not label.rows.drawn:
            assert all(each <= {number} for number, each in enumerate(influenced)), steps
    assert kept > len(seeds) // 8
