"""Tests of `dpoptax.information_flow`: every path around the noise is reported, and no others."""

import dataclasses
import functools
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

import dpoptax
from dpoptax import information_flow, matrix
from dpoptax._random.keys import two_words
from dpoptax._release import gaussian
from dpoptax._support import marks as _marks
from dpoptax.training import load_config
from dpoptax.training.run.program import RunProgram
from tests.helpers import covering, slow_but

KEY = jax.random.key(0)
CLIP = dpoptax.l2_clip(1.0)
NOISE = {"noise_multiplier": 1.0, "batch_size": 4, "key": KEY}
SCHEDULE = {"noise_multiplier": {0: 1.9, 3: 1.1, 5: 1.5}}
PARAMS, BATCH, MASK = jnp.zeros(3), jnp.ones((8, 3)), jnp.ones(8, bool)
ADAPTIVE = dpoptax.contrib.adaptive_clip(0.1)
ENCODING = dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=1.0)


def loss_fn(params, example):
    return jnp.sum((params - example) ** 2)


def short_noise(tree, stddev, key):
    return jax.tree.map(lambda leaf: leaf + stddev * two_words(key, 0)[0], tree)


def short_stage(**changes):
    """Returns the Gaussian noise stage with noise of few operations, which is followed faster."""
    tx = dpoptax.gaussian_noise(**NOISE | changes)

    def update(updates, state, params=None):
        with mock.patch.object(gaussian, "add_noise", short_noise):
            return tx.update(updates, state, params)

    return tx._replace(update=update)


# Compiled, so that all tests share the traces.
GRAD_FN = jax.jit(dpoptax.clipped_grad(loss_fn, CLIP))
GAUSSIAN = short_stage()
GAUSSIAN = GAUSSIAN._replace(update=jax.jit(GAUSSIAN.update))


def flow_of(shows=None, *, noise=None, clip=CLIP, grads=None, behind=()):
    """Returns the flow of a step that returns parameters, state and the result of `shows`."""
    tx = optax.chain(GAUSSIAN if noise is None else noise, *behind, optax.adam(0.1))
    grad_fn = GRAD_FN if clip is CLIP else dpoptax.clipped_grad(loss_fn, clip)

    def step(params, opt_state, batch, mask):
        points = dpoptax.gradient_points(opt_state, params)
        clipped = (grads or grad_fn)(points, batch, mask)
        updates, opt_state = tx.update(clipped, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, shows and shows(params, opt_state, batch, mask, clipped)

    return information_flow(
        jax.jit(step), PARAMS, tx.init(PARAMS), BATCH, MASK, private_argnums=(2, 3)
    )


def paths(shown):
    return {each.path for each in shown}


def assert_redraws(again, step, *given, private_argnums=(2, 3), **options):
    """Checks whether a step is reported to draw noise again."""
    flow = information_flow(step, *given, private_argnums=private_argnums, **options)
    assert bool(flow.private) == bool(flow.redrawn) == again


STAGES = {
    "gaussian": (dpoptax.gaussian_noise(**NOISE), CLIP),
    "fixed point": (dpoptax.gaussian_noise(**NOISE, fixed_point=True), CLIP),
    "schedule": (dpoptax.gaussian_noise(**NOISE | SCHEDULE), CLIP),
    "schedule, fixed point": (dpoptax.gaussian_noise(**NOISE | SCHEDULE, fixed_point=True), CLIP),
    "ChaCha20": (
        dpoptax.gaussian_noise(**{**NOISE, "key": dpoptax.random_key_from_os("chacha20")}),
        CLIP,
    ),
    "adaptive": (dpoptax.contrib.adaptive_gaussian_noise(ADAPTIVE, **NOISE), ADAPTIVE),
    "encoded": (dpoptax.gaussian_noise(**NOISE), ENCODING),
    "correlated": (dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE), CLIP),
    "correlated, fixed point": (
        dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE, fixed_point_clip=CLIP),
        CLIP,
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_private_step_shows_only_releases(stage):
    noise, clip = STAGES[stage]
    flow = flow_of(noise=noise, clip=clip)
    assert flow.private == flow.redrawn == ()
    kinds = {each.path: each.kind for each in flow.shown}
    assert kinds["[0]"] == "released"
    secret = {path.rpartition(".")[2].partition("[")[0] for path in paths(flow.secret)}
    assert secret == ({"key", "buffers"} if stage.startswith("correlated") else {"key"})


def test_method_state_consists_of_releases():
    flow = flow_of(
        behind=(dpoptax.disk(kappa=0.7, gamma=0.5), dpoptax.doppler(b=(0.5,), a=(-0.5,)))
    )
    assert flow.private == ()
    assert {path.rpartition(".")[2] for path in paths(flow.secret)} == {"key"}


def losses(params, opt_state, batch, mask, clipped):
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, batch))


def printed(params, opt_state, batch, mask, clipped):
    jax.debug.print("{}", mask.sum())


def checked(params, opt_state, batch, mask, clipped):
    checkify.check(batch.sum() > 0, "the error tells of them")


def printed_in_a_loop(params, opt_state, batch, mask, clipped):
    jax.lax.scan(lambda _, row: (None, printed(None, None, None, row > 0, None)), None, batch)


def on_the_host(params, opt_state, batch, mask, clipped):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return 0.0 * jax.pure_callback(lambda x: np.float32(x.sum()), shape, batch)


def chosen(params, opt_state, batch, mask, clipped):
    return jax.lax.cond(jnp.sum(batch) > 0, lambda: 1.0, lambda: 0.0)


def rounds(params, opt_state, batch, mask, clipped):
    return jax.lax.while_loop(lambda n: n < jnp.sum(mask), lambda n: n + 1, 0)


def rounds_by_reference(params, opt_state, batch, mask, clipped):
    """The values written in the rounds decide the number of rounds."""
    ref = jax.new_ref(9.0)

    def turn(n):
        ref[...] -= jnp.abs(batch).sum()
        return n + 1

    return jax.lax.while_loop(lambda _: ref[...] > 0, turn, 0)


def a_round_later(params, opt_state, batch, mask, clipped):
    """The third round shows a value that the first round wrote."""

    def shift(carry, row):
        first, second = carry
        return (jnp.sum(row), first), second

    return jax.lax.scan(shift, (0.0, 0.0), batch)[1]


def by_reference(params, opt_state, batch, mask, clipped):
    ref = jax.new_ref(jnp.zeros(3))

    def add(i, _):
        ref[...] += batch[i]

    jax.lax.fori_loop(0, 8, add, None)
    return ref[...]


def by_reduction(params, opt_state, batch, mask, clipped):
    """Returns the last number of a row by a reduction that returns its second operand."""
    return jax.lax.reduce(batch, 0.0, lambda a, b: b, (0, 1))


def into_the_open(params, opt_state, batch, mask, clipped):
    OPEN[...] = batch.sum()


OPEN = jax.new_ref(0.0)


LEAKS = {
    losses: "[2]",
    printed: "debug_print",
    printed_in_a_loop: "debug_print",
    checked: "check",
    on_the_host: "pure_callback",
    chosen: "[2]",
    rounds: "[2]",
    rounds_by_reference: "jax.Ref",
    a_round_later: "[2]",
    by_reference: "jax.Ref",
    by_reduction: "[2]",
    into_the_open: "jax.Ref",
    lambda *given: given[3].sum(): "[2]",
    lambda *given: given[4].sum: "[2]",
    lambda *given: optax.tree.norm(given[4].sum): "[2]",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_names_paths_around_the_noise(leak):
    flow = flow_of(leak)
    assert LEAKS[leak] in paths(flow.private)
    assert len(paths(flow.private)) == 1 + (leak is on_the_host)
    assert all(each.where for each in flow.private)


def test_table_names_the_line():
    """The table names the user's line wherever the user's code computed the value."""
    text = str(flow_of(losses))
    assert "private" in text.splitlines()[1]
    assert "information_flow_test.py" in text
    assert "secret" in text
    assert "released" in text


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_drawn_twice_hides_nothing(compiled):
    tx = short_stage()
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)

    def release(params, state, batch, mask):
        return tx.update(grad_fn(dpoptax.gradient_points(state, params), batch, mask), state)

    release = jax.jit(release) if compiled else release

    def step(params, state, batch, mask, *, again):
        first, after = release(params, state, batch, mask)
        second, _ = release(params, state if again else after, 2 * batch, mask)
        return first, second

    given = PARAMS, tx.init(PARAMS), BATCH, MASK
    found = {
        again: information_flow(
            functools.partial(step, again=again), *given, private_argnums=(2, 3)
        )
        for again in (True, False)
    }
    assert paths(found[True].private) == {"[1]"}
    assert len(found[True].redrawn) == 1
    assert "may be drawn a second time" in str(found[True])
    assert (found[False].private, found[False].redrawn) == ((), ())


def twice(params, state, batch, mask, *, then=lambda state: state):
    """Returns the releases of two batches from one state."""

    def release(state, batch):
        grads = GRAD_FN(dpoptax.gradient_points(state, params), batch, mask)
        return GAUSSIAN.update(grads, state)[0]

    return release(state, batch), release(then(state), 2 * batch)


def in_loops(params, state, batch, mask):
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def turn(state, batch):
        grads = grad_fn(dpoptax.gradient_points(state, params), batch, mask)
        released, state = tx.update(grads, state)
        return state, released

    return [jax.lax.scan(turn, state, part[None])[1] for part in (batch, 2 * batch)]


def side_by_side(params, state, batch, mask):
    """Releases at several points with one key, so all have the same noise."""
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def release(params):
        grads = grad_fn(dpoptax.gradient_points(state, params), batch, mask)
        return tx.update(grads, state)[0]

    return jax.vmap(release)(jnp.stack([params, 2 * params]))


def groups_side_by_side(params, state, batch, mask):
    """Releases groups of points with one key per group, so noise repeats within a group."""

    def group(key):
        return side_by_side(params, dataclasses.replace(state, key=key), batch, mask)

    return jax.vmap(group)(jax.random.split(state.key, 2))


def chosen_state(state):
    other = dataclasses.replace(state, count=2 * state.count)
    return jax.lax.cond(state.count > 0, lambda: state, lambda: other)


def test_only_one_of_two_branches_draws():
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def step(params, state, batch, mask):
        def release(batch):
            points = dpoptax.gradient_points(state, params)
            return tx.update(grad_fn(points, batch, mask), state)[0]

        return jax.lax.cond(state.count > 9, release, lambda rows: 2 * release(-rows), batch)

    given = PARAMS, tx.init(PARAMS), BATCH, MASK
    assert information_flow(step, *given, private_argnums=(2, 3)).private == ()


@pytest.mark.parametrize(
    "step",
    [
        *(in_loops, side_by_side, groups_side_by_side),
        functools.partial(twice, then=lambda state: jax.tree.map(jnp.array, state)),
        lambda params, state, *data: twice(params, chosen_state(state), *data),
    ],
    ids=["in loops", "side by side", "groups side by side", "copied", "chosen"],
)
def test_detects_noise_drawn_twice(step):
    state = dpoptax.gaussian_noise(**NOISE).init(PARAMS)
    assert_redraws(True, step, PARAMS, state, BATCH, MASK)


@jax.jit
def released_with(key, total, params):
    """Returns the release of a sum with the noise of a key; traced once for all tests."""
    tx = short_stage(key=key)
    return tx.update(total, tx.init(params))[0]


def with_keys(params, key, batch, mask, *, run):
    """Passes `run` a function that maps a key to a release with that key's noise."""
    total = GRAD_FN(dpoptax.gradient_points((), params), batch, mask)
    return run(functools.partial(released_with, total=total, params=params), key)


def in_turns(release, keys):
    return jax.lax.scan(lambda _, key: (None, release(key)), None, keys)[1]


def by_number(release, key, numbers):
    return in_turns(lambda number: release(jax.random.fold_in(key, number)), numbers)


def indexed(release, keys, turns=4):
    return jax.lax.fori_loop(0, turns, lambda t, total: total + release(keys[t]), jnp.zeros(3))


def swapped(release, key):
    """Exchanges two keys in each turn."""
    keys = tuple(jax.random.split(key))
    return jax.lax.scan(lambda k, _: (k[::-1], release(k[0])), keys, length=3)[1]


def split_on(release, key, *, used=lambda key, sub: sub):
    """Splits a key in each turn of two loops and again after them."""

    def turn(key, _):
        key, sub = jax.random.split(key)
        return key, release(used(key, sub))

    key, first = jax.lax.scan(turn, key, length=3)
    key, second = jax.lax.while_loop(
        lambda carry: carry[1][0] < 1.0, lambda carry: turn(carry[0], None), (key, first[0])
    )
    return first, second, turn(key, None)[1]


def used_and_split(release, key):
    turn = lambda key, _: (jax.random.split(key)[0], release(key))  # noqa: E731
    return jax.lax.scan(turn, key, length=3)[1]


def one_of_two(key):
    first, second = jax.random.split(key)
    return jax.lax.select(jax.random.bernoulli(key), first, second)


def two_of_three(release, key):
    return release(jax.random.split(key, 3)[1]), release(jax.random.split(key, 2)[1])


def from_to(release, key, *ends):
    """Loops over numbers that are folded into the key."""
    add = lambda t, total: total + release(jax.random.fold_in(key, t))  # noqa: E731
    return [jax.lax.fori_loop(*end, add, jnp.zeros(3)) for end in ends]


def begun_anew(release, key):
    """A count that restarts after some turns."""

    def turn(t, _):
        return jnp.where(t == 2, 0, t + 1), release(jax.random.fold_in(key, t))

    return jax.lax.scan(turn, 0, length=9)[1]


def kept_by_chance(release, key):
    """A key that advances by a split only in some turns."""

    def turn(key, _):
        after, sub = jax.random.split(key)
        return jnp.where(jax.random.bernoulli(sub), after, key), release(sub)

    return jax.lax.scan(turn, key, length=9)[1]


def counted_by(release, key, *, by):
    def turn(t, _):
        return t + by, release(jax.random.fold_in(key, t))

    return jax.lax.scan(turn, 9, length=3)[1]


FOLDED = jax.vmap(jax.random.fold_in)
SPLIT = functools.partial(jax.random.split, num=4)
RUNS_OF_KEYS = {
    "one of all, in turns": (lambda r, k: in_turns(r, jnp.broadcast_to(k, (4,))), True),
    "stacked, in turns": (lambda r, k: jax.lax.map(r, jnp.stack([k, k])), True),
    "joined, in turns": (lambda r, k: in_turns(r, jnp.concatenate([k[None], k[None]])), True),
    "one of all, side by side": (lambda r, k: jax.vmap(r)(jnp.stack([k, k])), True),
    "one of all, by index": (lambda r, k: indexed(r, jnp.broadcast_to(k, (4,))), True),
    "one of all, two": (lambda r, k: [r(key) for key in jnp.stack([k, k])], True),
    "one and one of all": (lambda r, k: (r(k), r(jnp.broadcast_to(k, (4,))[2])), True),
    "cloned": (lambda r, k: (r(k), r(jax.random.clone(k))), True),
    "by equal numbers": (lambda r, k: by_number(r, k, jnp.zeros(4, int)), True),
    "chosen twice": (lambda r, k: in_turns(r, SPLIT(k)[jnp.arange(4) // 2]), True),
    "one of two": (lambda r, k: (r(SPLIT(k)[0]), r(one_of_two(k))), True),
    "one of two by a number": (
        lambda r, k: (r(SPLIT(k)[0]), r(SPLIT(k)[jax.random.bits(k) % 4])),
        True,
    ),
    "changing places": (swapped, True),
    "used before": (lambda r, k: (r(k), used_and_split(r, k)), True),
    "used and split on": (used_and_split, False),
    "used and split": (functools.partial(split_on, used=lambda key, _: key), False),
    "used, then kept": (lambda r, k: (r(k), split_on(r, k, used=lambda *keys: keys[0])), False),
    "split, and the same again": (lambda r, k: (split_on(r, k), r(jax.random.split(k)[1])), True),
    "split in two and in three": (two_of_three, True),
    "split and folded in": (lambda r, k: (r(SPLIT(k)[1]), r(jax.random.fold_in(k, 1))), True),
    "unpacked, and by index": (lambda r, k: (*map(r, SPLIT(k)), r(SPLIT(k)[2])), True),
    "in turns, twice": (lambda r, k: (in_turns(r, SPLIT(k)), in_turns(r, SPLIT(k))), True),
    "in turns, and by index": (lambda r, k: (in_turns(r, SPLIT(k)), r(SPLIT(k)[2])), True),
    "by index, past the end": (lambda r, k: indexed(r, SPLIT(k), turns=5), True),
    "by remainders": (lambda r, k: by_number(r, k, jnp.arange(4) % 2), True),
    "by products": (lambda r, k: by_number(r, k, 0 * jnp.arange(4)), True),
    "by numbers that come again": (lambda r, k: from_to(r, k, (0, 4), (3, 6)), True),
    "by numbers, and split": (lambda r, k: (from_to(r, k, (0, 4)), in_turns(r, SPLIT(k))), True),
    "begun anew": (begun_anew, True),
    "kept by chance": (kept_by_chance, True),
    "by numbers from where others end": (lambda r, k: from_to(r, k, (0, 3), (3, 6)), False),
    "by one number": (functools.partial(counted_by, by=0), True),
    "by numbers down": (functools.partial(counted_by, by=-1), True),
    "by numbers up": (functools.partial(counted_by, by=2), False),
    "split on": (split_on, False),
    "unpacked": (lambda r, k: [*map(r, SPLIT(k))], False),
    "split, in turns": (lambda r, k: in_turns(r, SPLIT(k)), False),
    "split, side by side": (lambda r, k: jax.vmap(r)(SPLIT(k)), False),
    "split, by index": (lambda r, k: indexed(r, SPLIT(k)), False),
    "split, stacked": (lambda r, k: in_turns(r, jnp.stack([*SPLIT(k)])), False),
    "split in two, a half": (lambda r, k: in_turns(r, jax.random.split(k, (4, 2))[:, 0]), False),
    "permuted": (lambda r, k: in_turns(r, SPLIT(k)[jax.random.permutation(k, 4)]), False),
    "by numbers": (lambda r, k: by_number(r, k, 5 + jnp.arange(4)), False),
    "by numbers, side by side": (
        lambda r, k: jax.vmap(lambda n: r(jax.random.fold_in(k, n)))(jnp.arange(4)),
        False,
    ),
    "by seeds": (lambda r, k: jax.vmap(lambda n: r(jax.random.key(n)))(jnp.arange(4)), False),
}


# Each way to derive keys once: equal and different ones, in turns, side by side and by index.
QUICK_RUNS_OF_KEYS = (
    *("one of all, in turns", "one of all, side by side", "one of all, by index", "cloned"),
    *("by equal numbers", "one of two", "changing places", "used before", "used and split on"),
    *("split, and the same again", "split in two and in three", "split and folded in"),
    *("by index, past the end", "by numbers that come again", "kept by chance", "by numbers up"),
    *("split on", "unpacked", "split, in turns", "split, side by side", "by numbers", "by seeds"),
)


@pytest.mark.parametrize("run", slow_but(QUICK_RUNS_OF_KEYS, RUNS_OF_KEYS))
def test_detects_repeated_keys_of_arrays(run):
    run, again = RUNS_OF_KEYS[run]
    step = functools.partial(with_keys, run=run)
    assert_redraws(again, step, PARAMS, KEY, BATCH, MASK, secret_argnums=1)


def test_detects_reuse_of_a_new_state_in_a_branch():
    """The count of a new state is a literal, converted in one place and not in another."""
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def step(params, batch, mask):
        state = tx.init(params)

        def release(batch):
            points = dpoptax.gradient_points(state, params)
            return tx.update(grad_fn(points, batch, mask), state, params)[0]

        other = jax.lax.cond(params[0] > 0, release, lambda rows: jnp.zeros(3), 2 * batch)
        return release(batch), other

    assert information_flow(step, PARAMS, BATCH, MASK, private_argnums=(1, 2)).redrawn


def test_detects_noise_of_a_repeated_constant_key():
    def step(batch):
        keys = [_marks.mark(KEY, _marks.NOISE) for _ in range(2)]
        return [jax.random.normal(key) + batch.sum() for key in keys]

    assert information_flow(step, BATCH, private_argnums=0).redrawn


def several_turns(params, state, batch, mask, *, loop, kept):
    """Runs steps in a loop; `kept` selects the state that enters the next step."""
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def turn(carry):
        params, now = carry
        grads = grad_fn(dpoptax.gradient_points(now, params), batch, mask)
        updates, after = tx.update(grads, now)
        return optax.apply_updates(params, updates), kept(state, after)

    return loop(turn, (params, state))


def scanned(turn, carry, turns=3):
    return jax.lax.scan(lambda carry, _: (turn(carry), None), carry, length=turns)[0]


def counted(turn, carry):
    return jax.lax.fori_loop(0, 3, lambda _, carry: turn(carry), carry)


def now_and_then(turn, carry):
    """Takes a step only in some turns, depending on the parameters."""
    return scanned(lambda c: jax.lax.cond(c[0][0] < 1.0, turn, lambda c: c, c), carry)


def again_now_and_then(turn, carry):
    """Like `now_and_then`, but from the first state each time."""

    def step(now):
        return jax.lax.cond(now[0][0] < 1.0, turn, lambda now: (now[0], carry[1]), now)

    return scanned(step, carry)


def until(turn, carry):
    return jax.lax.while_loop(lambda c: c[0][0] < 1.0, turn, carry)


def in_epochs(turn, carry):
    """Each epoch keeps only the parameters of the previous one."""
    return scanned(lambda epoch: (scanned(turn, (epoch[0], carry[1]))[0], epoch[1]), carry)


@pytest.mark.parametrize(
    ("loop", "kept", "again"),
    [
        *((loop, "first", True) for loop in (scanned, counted, until)),
        *((loop, "last", False) for loop in (scanned, counted, until, now_and_then)),
        (again_now_and_then, "last", True),
        (lambda *loop: scanned(lambda carry: scanned(*loop[:1], carry), loop[1]), "last", False),
        (in_epochs, "last", True),
        (functools.partial(scanned, turns=1), "first", False),
    ],
)
def test_detects_reuse_of_a_state_across_loop_steps(loop, kept, again):
    keep = {"first": lambda first, last: first, "last": lambda first, last: last}[kept]
    state = dpoptax.gaussian_noise(**NOISE).init(PARAMS)
    step = functools.partial(several_turns, loop=loop, kept=keep)
    assert_redraws(again, step, PARAMS, state, BATCH, MASK)


@pytest.mark.parametrize("again", [False, True])
def test_detects_equal_keys_of_two_new_stages(again):
    keys = KEY, jax.random.key(0 if again else 9)
    chains = [short_stage(key=key) for key in keys]

    def step(params, batch, mask):
        grads = dpoptax.clipped_grad(loss_fn, CLIP)(
            dpoptax.gradient_points((), params), batch, mask
        )
        return [tx.update(grads, tx.init(params))[0] for tx in chains]

    assert_redraws(again, step, PARAMS, BATCH, MASK, private_argnums=(1, 2))


@pytest.mark.parametrize(
    ("folded", "again"),
    [
        (lambda keys, runs: (keys, keys), True),
        (lambda keys, runs: jax.vmap(lambda key: tuple(jax.random.split(key)))(keys), False),
        (lambda keys, runs: [FOLDED(keys, runs + i) for i in (0, 1)], False),
        (lambda keys, runs: [FOLDED(jnp.stack([keys[0]] * 3), runs + i) for i in (0, 1)], True),
        (lambda keys, runs: (keys, keys[::-1]), True),
    ],
)
def test_detects_equal_keys_of_vmapped_runs(folded, again):
    """Each run draws twice. If the runs shared one key, their draws could coincide."""

    def step(params, keys, runs, batch, mask):
        def release(key):
            grads = GRAD_FN(dpoptax.gradient_points((), params), batch, mask)
            return released_with(key, grads, params)

        return [jax.vmap(release)(each) for each in folded(keys, runs)]

    keys, runs = jax.random.split(KEY, 3), jnp.arange(3)
    assert_redraws(again, step, PARAMS, keys, runs, BATCH, MASK, private_argnums=(3, 4))


@pytest.mark.parametrize(
    ("generator", "again"), covering(["threefry", "chacha20"], [False, True], strength=1)
)
def test_detects_reuse_of_a_state_after_loops(generator, again):
    key = dpoptax.random_key_from_os(generator)
    tx = short_stage(key=key)
    update = jax.jit(tx.update)

    def step(params, begun, batch, mask):
        def turn(state, _):
            grads = GRAD_FN(dpoptax.gradient_points(state, params), batch, mask)
            return update(grads, state)[::-1]

        state, first = turn(begun, None)
        state, second = jax.lax.scan(turn, state, length=3)
        state, third = jax.lax.scan(turn, begun if again else state, length=3)
        return first, second, third, turn(state, None)[1]

    assert_redraws(again, step, PARAMS, tx.init(PARAMS), BATCH, MASK)


@pytest.mark.parametrize(
    ("added", "key", "again"),
    [
        (lambda total: total, jax.P(), True),
        (lambda total: jax.lax.psum(total, "data"), jax.P(), False),
        (lambda total: total, jax.P("data"), False),
    ],
    ids=["a sum of each", "one sum", "noise of each"],
)
def test_detects_equal_noise_on_several_devices(added, key, again):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, grad_fn = jax.P("data"), dpoptax.clipped_grad(loss_fn, CLIP)

    def release(params, seed, batch, mask):
        tx = short_stage(key=jax.random.key(jnp.sum(seed)))
        state = tx.init(params)
        grads = added(grad_fn(dpoptax.gradient_points(state, params), batch, mask))
        return tx.update(grads, state)[0][None]

    specs = {"in_specs": (jax.P(), key, rows, rows), "out_specs": rows, "check_vma": False}
    step = jax.shard_map(release, mesh=mesh, **specs)
    assert_redraws(again, step, PARAMS, jnp.zeros(8, int), BATCH, MASK)


SECRETS = {
    "the batch's size": lambda params, state, indices, mask: mask.sum(),
    "the indices": lambda params, state, indices, mask: indices,
    "the noise key": lambda params, state, indices, mask: state.key,
    "noise": lambda params, state, indices, mask: jax.random.normal(state.key),
    "a print": lambda params, state, indices, mask: jax.debug.print("{}", mask.sum()),
}


@pytest.mark.parametrize("name", [None, *SECRETS])
def test_only_noise_state_may_hold_secrets(name):
    """A step that returns its batch size is reported as private; it was once taken for a secret."""
    tx, grad_fn = GAUSSIAN, GRAD_FN

    def step(params, state, data, indices, mask):
        grads = grad_fn(dpoptax.gradient_points(state, params), data[indices], mask)
        updates, state = tx.update(grads, state)
        shown = name and SECRETS[name](params, state, indices, mask)
        return optax.apply_updates(params, updates), state, shown

    given = PARAMS, tx.init(PARAMS), jnp.ones((40, 3)), jnp.arange(8), MASK
    flow = information_flow(step, *given, private_argnums=2, secret_argnums=(3, 4))
    wanted = {"debug_print"} if name == "a print" else {"[2]"}
    assert paths(flow.private) == (wanted if name else set())
    assert paths(flow.secret) == {"[1].key"}


def centered(points, batch, mask):
    """A loss that sees all examples through the mean in its closure."""
    mean = batch.mean(0)
    loss = lambda params, example: loss_fn(params, example - mean)  # noqa: E731
    return dpoptax.clipped_grad(loss, CLIP)(points, batch, mask)


def looked_ahead(points, batch, mask):
    """A point moved by the data."""
    moved = dpoptax.gradient_points((), points.points[0] + batch.mean(0))
    return dpoptax.clipped_grad(loss_fn, CLIP)(moved, batch, mask)


def moved_by_a_sum(points, batch, mask):
    """A point moved by a clipped sum without noise."""
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    total = grad_fn(points, batch, mask).sum
    moved = dpoptax.gradient_points((), points.points[0] - total)
    return grad_fn(moved, batch, mask)


def moved_by_losses(points, batch, mask):
    """A point moved by the auxiliary outputs of the sum."""
    loss = lambda params, example: (loss_fn(params, example), example)  # noqa: E731
    _, examples = dpoptax.clipped_grad(loss, CLIP, has_aux=True)(points, batch, mask)
    moved = dpoptax.gradient_points((), points.points[0] - examples.sum(0))
    return dpoptax.clipped_grad(loss_fn, CLIP)(moved, batch, mask)


def moved_by_derivatives(points, batch, mask):
    """A point moved by a derivative of a clipped sum, which has no bound if it is not zero."""
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    total = lambda params: grad_fn(dpoptax.gradient_points((), params), batch, mask).sum  # noqa: E731
    _, change = jax.jvp(total, points.points[:1], points.points[:1])
    return grad_fn(dpoptax.gradient_points((), points.points[0] - change), batch, mask)


def test_sealed_sums_have_no_derivative():
    assert flow_of(grads=moved_by_derivatives).private == ()


@pytest.mark.parametrize("grads", [centered, looked_ahead, moved_by_a_sum, moved_by_losses])
@pytest.mark.parametrize("method", slow_but(("auto",), ("auto", "vmap")))
def test_noise_does_not_cover_unclipped_dependence(grads, method, monkeypatch):
    made = dpoptax.clipped_grad
    monkeypatch.setattr(dpoptax, "clipped_grad", functools.partial(made, method=method))
    assert {"[0]", "[1][1][0].mu"} <= paths(flow_of(grads=grads).private)


def standardized(points, batch, mask):
    batch = (batch - batch.mean(0)) / batch.std(0)
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch, mask)


def mixed_up(points, batch, mask):
    """Mixup: an example is part of two rows and changes both."""
    batch = 0.7 * batch + 0.3 * batch[jax.random.permutation(jax.random.key(1), len(batch))]
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch, mask)


def repeated(points, batch, mask):
    """Each example in two rows, for two augmentations."""
    batch, mask = jnp.concatenate([batch, -batch]), jnp.concatenate([mask, mask])
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch, mask)


def normalized_per_example(points, batch, mask):
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(points.points[0], batch)
    grads = grads / jnp.linalg.norm(grads)
    return dpoptax.extend.clip_per_example(CLIP).update(grads, (), PARAMS, mask=mask)[0]


def keyed_by_place(points, batch, mask):
    """Randomness by position: an added example changes that of all later examples."""
    loss = lambda params, x, key: loss_fn(params, x + jax.random.normal(key, x.shape))  # noqa: E731
    grad_fn = dpoptax.clipped_grad(loss, CLIP)
    return grad_fn(points, batch, mask, key=KEY, ids=jnp.cumsum(mask))


def labels_of_others(points, batch, mask):
    """Labels in a different order than their examples."""
    loss = lambda params, pair: loss_fn(params, pair[0]) * pair[1]  # noqa: E731
    labels = batch[:, 0][jax.random.permutation(jax.random.key(1), len(batch))]
    return dpoptax.clipped_grad(loss, CLIP)(points, (batch, labels), mask)


def masks_of_others(points, batch, mask):
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch[:4], mask[4:])


def several_at_once(points, batch, mask):
    """Rows of one example, each treated as a batch by jax.vmap."""
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    sums = jax.vmap(lambda row: grad_fn(points, row, jnp.ones(1, bool)))(batch[:, None])
    return jax.tree.map(lambda x: x[0], sums)


@pytest.mark.parametrize(
    "grads",
    [
        *(standardized, mixed_up, repeated, normalized_per_example, keyed_by_place),
        *(labels_of_others, masks_of_others, several_at_once),
    ],
)
def test_noise_does_not_cover_joined_examples(grads):
    flow = flow_of(grads=grads)
    assert "[0]" in paths(flow.private)
    assert flow.joined
    assert all("information_flow_test.py" in each for each in flow.joined)
    assert "examples are joined in front of a clip: " in str(flow)


def by_half(points, batch, mask):
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    half = len(batch) // 2
    parts = [(batch[:half], mask[:half]), (batch[half:], mask[half:])]
    return dpoptax.accumulate(*(grad_fn(points, *part) for part in parts))


def scaled_by_rows(points, batch, mask):
    batch = batch / jnp.maximum(1.0, jnp.linalg.norm(batch, axis=1, keepdims=True))
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch, mask & (batch[:, 0] > 0))


def in_microbatches(points, batch, mask, size=4):
    """Per-example gradients from a loop over parts, concatenated."""
    one = lambda row: jax.grad(loss_fn)(points.points[0], row)  # noqa: E731
    grads = jax.lax.map(one, batch, batch_size=size)
    return dpoptax.extend.clip_per_example(CLIP).update(grads, (), PARAMS, mask=mask)[0]


def on_devices(points, batch, mask, vma=False):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("data")
    each = jax.vmap(jax.grad(loss_fn), (None, 0))
    specs = {"in_specs": (jax.P(), rows), "out_specs": rows, "check_vma": vma}
    grads = jax.shard_map(each, mesh=mesh, **specs)(points.points[0], batch)
    return dpoptax.extend.clip_per_example(CLIP).update(grads, (), PARAMS, mask=mask)[0]


def with_a_rest(points, batch, mask):
    return in_microbatches(points, batch, mask, size=3)


@pytest.mark.parametrize(
    "grads", [by_half, scaled_by_rows, in_microbatches, with_a_rest, on_devices]
)
def test_row_wise_operations_stay_covered(grads):
    flow = flow_of(grads=grads)
    assert flow.private == ()
    assert flow.joined == ()


def centered_on_devices(points, batch, mask):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, center = jax.P("data"), lambda x: x - jax.lax.pmean(x, "data")
    batch = jax.shard_map(center, mesh=mesh, in_specs=rows, out_specs=rows)(batch)
    return dpoptax.clipped_grad(loss_fn, CLIP)(points, batch, mask)


def differentiated_on_devices(points, batch, mask):
    """Differentiates by parameters replicated on all devices, so `jax.grad` sums over devices."""
    return on_devices(points, batch, mask, vma=True)


@pytest.mark.parametrize("grads", [centered_on_devices, differentiated_on_devices])
def test_sums_over_devices_join_examples(grads):
    (joined,) = flow_of(grads=grads).joined
    assert joined.startswith("psum")


def rows_of(draw):
    """Returns the flow of a step that draws its batch from all data; `draw` indexes them."""
    tx = short_stage()
    grad_fn = dpoptax.clipped_grad(lambda params, example: loss_fn(params, example[0]), CLIP)

    def step(params, state, t, indices, mask, data, labels):
        batch = tuple(draw(x, t, indices) for x in (data, labels))
        grads = grad_fn(dpoptax.gradient_points(state, params), batch, mask)
        return tx.update(grads, state, params)

    given = PARAMS, tx.init(PARAMS), 3, jnp.arange(8), MASK, jnp.ones((40, 3)), jnp.ones(40)
    return information_flow(step, *given, private_argnums=(5, 6), secret_argnums=(3, 4))


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda x, t, indices: x[indices], True),
        (lambda x, t, indices: x.at[indices].get(mode="clip"), True),
        (lambda x, t, indices: jnp.take(x, indices, axis=0, mode="fill"), False),
        (lambda x, t, indices: x[jnp.arange(8)], False),  # public indices
        (lambda x, t, indices: x[:8], False),
    ],
)
def test_reports_secret_indices_that_are_clamped_to_the_rows(draw, found):
    flow = rows_of(draw)
    assert bool(flow.clamped) == found
    assert all(each.startswith("40 rows in information_flow_test.py") for each in flow.clamped)
    assert ("indices are clamped to N rows, check N: 40 rows" in str(flow)) == found


def test_lookups_of_one_example_are_not_clamped_rows():
    """Words that look up a table, or a random crop of one example, are not draws of rows."""
    key = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=8, key=KEY).init(PARAMS).key

    def crop(batch, key):
        return jax.vmap(lambda x, k: x[jax.random.randint(k, (), 0, 3)])(
            batch, jax.random.split(key, 8)
        )

    flow = information_flow(crop, BATCH, key, private_argnums=0, secret_argnums=1)
    assert flow.clamped == ()
    lookup = information_flow(
        lambda table, words: table[words], PARAMS, jnp.arange(8), private_argnums=1
    )
    assert lookup.clamped == ()


DRAWS = {
    "indices": lambda x, t, indices: x[indices],
    "take": lambda x, t, indices: jnp.take(x, indices, axis=0),
    "in order": lambda x, t, indices: jax.lax.dynamic_slice_in_dim(x, 8 * t, 8),
    "in order, counted": lambda x, t, indices: jnp.take(x, 8 * t + jnp.arange(8), axis=0),
    "the first": lambda x, t, indices: x[jnp.arange(8)],
    "one of two orders": lambda x, t, indices: x[
        jax.lax.cond(t > 0, lambda: indices, lambda: indices[::-1])
    ],
    "from the end": lambda x, t, indices: jnp.take(x, indices - 40, axis=0),
    "a permutation": lambda x, t, indices: x[jax.random.permutation(KEY, 40)[:8]],
}


PADDED = {
    "zeros below": lambda x: jnp.concatenate([x, jnp.zeros((4, *x.shape[1:]), x.dtype)]),
    "zeros above": lambda x: jnp.concatenate([jnp.zeros((2, *x.shape[1:]), x.dtype), x]),
    "padded": lambda x: jnp.pad(x, ((0, 4), *[(0, 0)] * (x.ndim - 1))),
    "padded, then cut": lambda x: jnp.pad(x, ((2, 4), *[(0, 0)] * (x.ndim - 1)))[1:],
    "columns stacked": lambda x: jnp.stack([x, x], -1).sum(-1),
    "stacked in front": lambda x: jnp.stack([x, x]).sum(0),
    "columns apart": lambda x: jnp.stack(jnp.unstack(x[..., None], axis=-1), -1)[..., 0],
    "repeated in columns": lambda x: jnp.tile(x[:, None], (1, 3, *[1] * (x.ndim - 1)))[:, 0],
}


def padded(make, of_mask):
    def grads(points, batch, mask):
        return dpoptax.clipped_grad(loss_fn, CLIP)(points, make(batch), of_mask(mask))

    return flow_of(grads=grads)


@pytest.mark.parametrize(
    "name", slow_but(("zeros below", "padded, then cut", "stacked in front"), PADDED)
)
def test_padding_with_public_rows_keeps_examples_apart(name):
    flow = padded(PADDED[name], lambda mask: PADDED[name](mask).astype(bool))
    assert (flow.private, flow.joined) == ((), ())


def test_inconsistent_padding_joins_examples():
    assert padded(PADDED["padded"], lambda mask: jnp.pad(mask, (4, 0))).joined
    filled = padded(
        lambda x: jnp.pad(x, ((0, 4), (0, 0)), constant_values=x[0, 0]), PADDED["padded"]
    )
    assert filled.joined
    assert padded(lambda x: jnp.tile(x, (2, 1)), lambda mask: jnp.tile(mask, 2)).joined
    assert padded(
        lambda x: jnp.stack(jnp.unstack(x)), lambda mask: jnp.stack(jnp.unstack(mask))
    ).joined


@pytest.mark.parametrize(
    "name", slow_but(("indices", "in order", "one of two orders", "a permutation"), DRAWS)
)
def test_batch_drawn_from_all_data_keeps_examples_apart(name):
    flow = rows_of(DRAWS[name])
    assert (flow.private, flow.joined) == ((), ())


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, t, indices: x[jax.random.randint(KEY, (8,), 0, 40)],
        lambda x, t, indices: x[indices % 5],
        lambda x, t, indices: x[jnp.minimum(indices, 5)],
        lambda x, t, indices: x[indices] + x[indices + 1],
        lambda x, t, indices: x[8 * t + jnp.arange(8)],
        lambda x, t, indices: jnp.take(x[:4], jnp.arange(8), axis=0, mode="clip"),
        lambda x, t, indices: x[:4][jnp.arange(8) - 4],
        lambda x, t, indices: jnp.take(x[:4], jnp.arange(8) - 4, axis=0),
        lambda x, t, indices: x[jnp.where(t + indices > 9, indices, indices + 1)],
        lambda x, t, indices: x[jax.lax.iota(jnp.int8, 512).astype(int)[-8:] + indices[:1]],
    ],
    ids=[
        *("with replacement", "remainders", "cut off", "neighbors", "past the end", "past it"),
        *("from both ends", "from both ends, filled", "one of two", "a count that wraps around"),
    ],
)
def test_example_in_two_rows_joins_examples(draw):
    flow = rows_of(draw)
    assert flow.private
    assert flow.joined


def test_trusts_sums_from_trust_clipped():
    def vouched(points, batch, mask):
        return dpoptax.extend.trust_clipped(batch.sum(0), CLIP, examples=len(batch))

    assert flow_of(grads=vouched).private == ()


def test_accepts_clip_and_noise():
    def step(params, state, batch, mask):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        return tx.update(grads, state, params, mask=mask)

    tx = dpoptax.clip_and_noise(CLIP, **NOISE)
    flow = information_flow(step, PARAMS, tx.init(PARAMS), BATCH, MASK, private_argnums=(2, 3))
    assert flow.private == ()


@pytest.mark.parametrize(
    "noise",
    [
        dpoptax.gaussian_noise(**{**NOISE, "noise_multiplier": 0.0}),
        dpoptax.contrib.geodp(0.1, **NOISE),
    ],
    ids=["no noise", "no proof"],
)
def test_stage_without_guarantee_releases_nothing(noise):
    assert "[0]" in paths(flow_of(noise=noise).private)


def test_follows_whole_run_and_lists_closed_over_data():
    tx = optax.chain(short_stage(), optax.sgd(0.1))
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    data = jnp.ones((200, 3))

    def run(params, opt_state, rows, data):
        def step(state, rows):
            params, opt_state = state
            points = dpoptax.gradient_points(opt_state, params)
            updates, opt_state = tx.update(
                grad_fn(points, data[rows], rows >= 0), opt_state, params
            )
            return (optax.apply_updates(params, updates), opt_state), optax.tree.norm(updates)

        return jax.lax.scan(step, (params, opt_state), rows)

    args = PARAMS, tx.init(PARAMS), jnp.zeros((5, 8), jnp.int32)
    flow = information_flow(run, *args, data, private_argnums=3, secret_argnums=2)
    assert flow.private == ()
    closed = information_flow(lambda *args: run(*args, data), *args, private_argnums=2)
    assert any("[200,3]" in each for each in closed.closed_over)
    assert "[200,3]" in str(closed)


def test_follows_nnx_step_as_function_of_values():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))

    noise = dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE)
    model = Model()
    optimizer = nnx.Optimizer(model, optax.chain(noise, optax.sgd(0.1)), wrt=nnx.Param)
    graph, states = nnx.split((model, optimizer))
    grad_fn = dpoptax.clipped_grad(lambda params, x: loss_fn(params["w"], x), CLIP)

    def step(model, optimizer, batch, mask):
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        opt_state = nnx.as_pure(optimizer.opt_state)
        grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask)
        updates, opt_state = optimizer.tx.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(optimizer.opt_state, nnx.state(opt_state))

    def of_values(states, batch, mask):
        model, optimizer = nnx.merge(graph, states)
        step(model, optimizer, batch, mask)
        return nnx.as_pure(nnx.state((model, optimizer)))

    args = BATCH, MASK
    with pytest.raises(TypeError, match=r"flax.nnx objects, got a Model.*nnx\.as_pure\(states\)"):
        information_flow(step, model, optimizer, *args, private_argnums=(2, 3))
    flow = information_flow(of_values, nnx.as_pure(states), *args, private_argnums=(1, 2))
    assert flow.private == ()
    assert len(flow.secret) == 2  # key and buffers
    assert {each.kind for each in flow.shown if "'w'" in each.path} == {"released", "secret"}


def test_names_argument_that_is_written_to():
    def write(ref, batch):
        ref[...] += batch.sum()

    flow = information_flow(write, jax.new_ref(0.0), BATCH, private_argnums=1)
    assert paths(flow.private) == {"jax.Ref"}


def test_refuses_argnums_out_of_range():
    with pytest.raises(ValueError, match=r"below their count of 1, got \(2,\)"):
        information_flow(jnp.sum, PARAMS, private_argnums=(2,))
    with pytest.raises(ValueError, match="below their count of 1, got -1"):
        information_flow(jnp.sum, PARAMS, private_argnums=0, secret_argnums=-1)


CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("digits/*.py"))


QUICK_CONFIGS = ("dp_sgd",)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=[pytest.mark.slow] * (path.stem not in QUICK_CONFIGS), id=path.stem
        )
        for path in CONFIGS
    ],
)
def test_trainer_step_shows_only_releases(path):
    task = load_config(path).task()
    run = RunProgram(task)
    state, inputs, frozen = run.arguments()

    def step(state, batch, key, frozen):
        return run.step()(state, batch._replace(key=key), frozen)

    arguments = state, inputs._replace(key=None), inputs.key, frozen  # the key is no data
    flow = information_flow(step, *arguments, private_argnums=1)
    assert flow.private == () or not task.is_private
    assert task.is_private or "[0]" in {each.path[:3] for each in flow.private}
