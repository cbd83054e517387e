"""Small problems that many tests share."""

import collections
import contextlib
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from dpoptax import accounting
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._ghost_clipping import plan
from dpoptax._losses.read_program import read_program
from dpoptax._losses.trace_loss import Examples, trace_loss
from dpoptax._pricing import accountants, events, renyi
from dpoptax._release.ledger import count_releases
from dpoptax._rounding import bounds
from dpoptax._rounding.block_sums import WholeBatch


def floats(values, dtype=jnp.float32):
    """Puts NumPy values on the device; JAX would compile a conversion for every shape."""
    return jax.device_put(np.asarray(values, dtype))


def normal(seed, shape, dtype=jnp.float32):
    """Draws standard normals with NumPy, because JAX would compile a generator for every shape."""
    return floats(np.random.default_rng(seed).normal(size=shape), dtype)


def mlp_params(seed, sizes=(5, 4, 3), dtype=jnp.float32):
    """Returns random parameters of a small tanh network, as a list of dicts."""
    rng = np.random.default_rng(seed)
    return [
        {"w": floats(rng.normal(size=(m, n)) / m**0.5, dtype), "b": floats(np.zeros(n), dtype)}
        for m, n in zip(sizes[:-1], sizes[1:], strict=True)
    ]


def mlp_loss(params, example):
    """Computes the cross-entropy of one example (x, y)."""
    x, y = example
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return -jax.nn.log_softmax(logits)[y]


def mlp_batch(seed, size, sizes=(5, 4, 3)):
    """Returns a random batch for `mlp_loss`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, sizes[0]))
    return floats(x), jax.device_put(rng.integers(sizes[-1], size=size))


def force_norm_method(monkeypatch, way):
    """Lets all products use one method for their norms, even where there is no choice.

    `way` is the method, or a function that returns it.
    """
    monkeypatch.setattr(plan, "has_one_position", lambda members, points: False)
    choose = way if callable(way) else lambda: way
    monkeypatch.setattr(plan, "choose_method", lambda *args, **kwargs: choose())


def profile(event, relation, interval=1e-3, **options):
    """Returns pairs of ε and δ that PLD proves, for the worse direction."""
    epsilons, deltas = accountants.curves_of(event, relation, interval, **options)
    return epsilons, deltas.max(0)


def divergences(event, orders, relation="add-or-remove-one"):
    """Returns the bounds on the Rényi divergences of an event, (orders,)."""
    parts = events.parts_of(event)
    return renyi.accountant_of(parts, events.RELATIONS[relation], orders).rdp


def event_epsilon(event, delta, **options):
    """Returns ε of a dp_accounting event at δ."""
    return accounting.Guarantee(event, **options).epsilon(delta)


def planned_epsilon(*, delta=1e-5, **run):
    """Returns ε of a planned run at δ."""
    return accounting.planned_guarantee(**run).epsilon(delta)


def after_releases(tx, params, count):
    """Returns the state of a noise stage after some releases, without drawing their noise."""
    return count_releases(tx.init(params), count, 0)


def filtered(tx, signal, stddev, read, seed=0):
    """Returns the outputs of a filter on noisy leaves (steps, d), and `read` of each state."""
    rng = np.random.default_rng(seed)
    inputs = jax.tree.map(lambda x: floats(x + stddev * rng.normal(size=x.shape)), signal)

    def body(state, g):
        out, state = tx.update(g, state)
        return state, (out, read(state))

    first = jax.tree.map(lambda x: x[0], inputs)
    _, found = jax.lax.scan(body, tx.init(first), inputs)
    return jax.tree.map(np.asarray, found)


def global_norm(tree):
    """Returns the l2 norm of a tree, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


def equations(jaxpr):
    """Returns all equations of a program, including its inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def slow_but(quick, names):
    """Returns all names as test parameters; those that are not among the quick ones are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in quick)) for name in names]


def covering(*values, strength=2):
    """Returns all combinations of the values as parameters, slow except a few that cover them.

    The few contain every combination of `strength` values, and use each value about equally often.
    The keys of a dict become the ids.
    """
    names = [list(map(str, each)) for each in values]
    values = [list(each.values()) if isinstance(each, dict) else list(each) for each in values]
    rows = list(itertools.product(*(range(len(each)) for each in values)))

    def parts(row):
        return set(itertools.combinations(enumerate(row), strength))

    missing, quick, used = set().union(*map(parts, rows)), set(), collections.Counter()

    def gain(row):
        return len(missing & parts(row)), -sum(used[each] for each in enumerate(row))

    while missing:
        quick.add(best := max(rows, key=gain))
        missing -= parts(best)
        used.update(enumerate(best))
    return [
        pytest.param(
            *(each[i] for each, i in zip(values, row, strict=True)),
            id="-".join(each[i] for each, i in zip(names, row, strict=True)),
            marks=[pytest.mark.slow] * (row not in quick),
        )
        for row in rows
    ]


@contextlib.contextmanager
def no_room():
    """Clips examples to the bound itself, as in the formulas that tests compare with.

    By default examples are clipped to the bound over 1 + τ, which leaves room for the rounding of
    the sum (tests/clip/sums_test.py).
    """
    exact = bounds.clip_coefficients

    def coefficients(*args, tau, **kwargs):
        return exact(*args, tau=0.0, **kwargs)

    with mock.patch.object(bounds, "clip_coefficients", coefficients):
        yield


@contextlib.contextmanager
def cancellations():
    """Yields S/n for the pieces of each example; its norm bound adds γ (S/n)² to the norm."""
    seen, exact = [], bounds.clip_coefficients

    def see(size):
        square, absolute = map(np.asarray, size)
        seen.extend((absolute[square > 0] / np.sqrt(square[square > 0])).tolist())

    def coefficients(clip, pieces, *args, **kwargs):
        for piece in pieces:
            jax.debug.callback(see, piece.size)
        return exact(clip, pieces, *args, **kwargs)

    with mock.patch.object(bounds, "clip_coefficients", coefficients):
        yield seen


def sum_by(engine, loss_fn, clip, points, batch, mask, keys=None):
    """Returns the total of `per_example_sum` or `ghost_clipped_sum`, for a loss without aux."""
    examples = Examples(batch, mask, WholeBatch(len(mask)), keys)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
    example, key = jax.tree.map(struct, (batch, keys))
    loss = trace_loss(loss_fn, points.points[0], example, key, has_aux=False)
    if engine is per_example_sum:
        return engine(loss, points, examples, clip=clip)[0]
    return engine(read_program(loss), clip, points, examples)[0]
