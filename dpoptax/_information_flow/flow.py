"""Which results of a step depend on private data, and whether all of it went through the noise."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._bookkeeping.explain import in_columns
from dpoptax._information_flow.following import LARGE, Follower
from dpoptax._information_flow.indices import GIVEN
from dpoptax._information_flow.labels import Holds, Label, kind
from dpoptax._information_flow.lines import in_short, where
from dpoptax._information_flow.rows import LEADING
from dpoptax._serialization import as_data
from dpoptax._trees import PyTree, nnx_kinds


@dataclasses.dataclass(frozen=True)
class Shown:
    """One array that a function returns, or hands to Python while it runs.

    Attributes:
      path: where it is in the result, such as `[1][0].count`; or the name of the callback, or of a
        `jax.Ref` that the function writes to.
      kind: "public": no private data has a part in it. "released": private data has, through noise
        stages alone. "secret": it tells of a noise key, or of noise that was drawn. "private":
        private data reaches it around the noise, or by rows of a table that were selected for a
        release that the function does not count.
      type: shape and dtype, such as `float32[8]`.
      where: the line that computed it; empty for an argument that is returned as it is.
    """

    path: str
    kind: str
    type: str
    where: str


@dataclasses.dataclass(frozen=True)
class InformationFlow:
    """What `dpoptax.information_flow` found; printing it lists what is private or secret.

    Attributes:
      shown: all that the function returns or hands to Python.
      closed_over: types of the arrays, of 100 numbers or more, that the function has from outside
        and not as arguments; they were taken for public.
      joined: the operations, with their lines, that made a row of a batch of several examples
        before it was clipped, or may have: what one example does is then bounded by no clip.
      redrawn: the lines that draw noise by a key that is not known to be another than all that
        noise is drawn by elsewhere, as `update` does twice from one state, in each turn of a loop,
        or on each device of a `jax.shard_map`: the difference of two such releases has none.
      uncounted: the lines that select rows of a table by `dpoptax.tables.selected_grad` for a
        release whose `update` the function does not surely call: no ledger has them then, and they
        are private.
    """

    shown: tuple[Shown, ...]
    closed_over: tuple[str, ...]
    joined: tuple[str, ...]
    redrawn: tuple[str, ...]
    uncounted: tuple[str, ...]

    @property
    def private(self) -> tuple[Shown, ...]:
        """What nobody may see, as private data reaches it around the noise."""
        return tuple(each for each in self.shown if each.kind == "private")

    @property
    def secret(self) -> tuple[Shown, ...]:
        """What is to be kept like the data: who has it can take noise away."""
        return tuple(each for each in self.shown if each.kind == "secret")

    def __str__(self) -> str:
        rows = [(s.kind, s.path, s.type, s.where) for s in (*self.private, *self.secret)]
        for rest in ("released", "public"):
            number = sum(each.kind == rest for each in self.shown)
            rows += [(rest, f"{number} more", "", "")] if number else []
        table = in_columns([("kind", "result", "type", "computed in"), *rows])
        if self.joined:
            table += f"\nexamples are joined in front of a clip: {', '.join(self.joined)}"
        if self.redrawn:
            table += f"\nnoise may be drawn a second time: {', '.join(self.redrawn)}"
        if self.uncounted:
            table += f"\nrows are selected that no update counts: {', '.join(self.uncounted)}"
        if self.closed_over:
            table += f"\nclosed over, taken for public: {', '.join(self.closed_over)}"
        return table


def information_flow(
    fn: Callable[..., Any],
    *args: PyTree,
    private_argnums: int | Sequence[int],
    secret_argnums: int | Sequence[int] = (),
) -> InformationFlow:
    """Follows private data through a step: what of its results depends on it, other than by noise.

    `fn` is traced and not run. Each value of the program is private if an operand is; the branches
    of a `cond` and the rounds of a `while_loop` count as computed from what decides on them. What
    a clip bounds becomes a release in a noise stage of this package (`gaussian_noise`,
    `correlated_noise`, …) that has noise and a guarantee: with `noise_multiplier=0` it does not,
    nor does `geodp`. Rows that `dpoptax.tables.selected_grad` selects are private unless `fn` also
    calls the `update` that counts them. What tells of a noise key, or of the noise that
    `correlated_noise` keeps, is secret.

    A clip bounds what one row of a batch does, and so what one example does where each row is of
    one alone. So rows are followed, too: private data that an operation joined across rows before
    they came to `clipped_grad` or `clip_per_example`, such as a batch that was standardised by its
    own mean, stay private behind the noise, and `joined` says where.

    So a step whose results are shown to others, and whose `private` is empty, shows them nothing
    but releases: not a loss, a gradient's norm, a batch's size, or a `jax.debug.print` that someone
    left in it.

    Privacy: a statement about `fn`, not about ε, which `dpoptax.accounting.epsilon_spent` states of
    the releases. It holds for every input, up to what the program does not contain: time and
    memory, Python outside of `fn` and objects that `fn` writes to, arrays that `fn` closes over
    (`closed_over`), and arguments that tell of private data and are not named. A function that runs
    on the host (`pure_callback`) sees what it is handed.

    Args:
      fn: the step, also under `jax.jit`; or any function of arrays.
      *args: its arguments, or trees of `jax.ShapeDtypeStruct` like them.
      private_argnums: which arguments are private, batch and mask as a rule. Row i of all of them,
        by their leading axes, is of the same example.
      secret_argnums: which tell of draws that nobody may know and that do not look at the data,
        such as a sampler's indices and mask where `fn` looks the batch up in all data: row i of
        what is looked up counts as one example's, so no index may be there twice.

    Returns:
      An `InformationFlow`.

    Raises:
      TypeError: an object of flax.nnx among the arguments; the message says what to give.
      ValueError: a number of an argument that is not there.

    >>> import dpoptax, jax.numpy as jnp, optax
    >>> tx = optax.chain(
    ...     dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=jax.random.key(0)),
    ...     optax.sgd(0.1),
    ... )
    >>> loss_fn = lambda params, example: jnp.sum((params - example) ** 2)
    >>> grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    >>> def step(params, opt_state, batch, mask):
    ...     grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     return params, opt_state, jnp.mean(batch)
    >>> params, batch, mask = jnp.zeros(2), jnp.ones((8, 2)), jnp.ones(8, bool)
    >>> flow = information_flow(step, params, tx.init(params), batch, mask, private_argnums=(2, 3))
    >>> [(each.path, each.type) for each in flow.private]
    [('[2]', 'float32[]')]
    """
    of_arguments = [Holds.NOTHING] * len(args)
    for name, given_numbers, holds in (
        ("private_argnums", private_argnums, Holds.PRIVATE),
        ("secret_argnums", secret_argnums, Holds.SECRET),
    ):
        for number in (given_numbers,) if isinstance(given_numbers, int) else given_numbers:
            if number not in range(len(args)):
                raise ValueError(
                    f"{name}={given_numbers}: {len(args)} arguments were given, numbered from 0"
                )
            of_arguments[number] |= holds
    _check_pure(args)
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    closed_over = zip(traced.jaxpr.constvars, traced.consts, strict=True)
    few = {var: x for var, x in closed_over if getattr(var.aval, "size", LARGE) < LARGE}
    follower = Follower({var: np.asarray(as_data(x)).tobytes() for var, x in few.items()})
    given = [
        label
        for number, (arg, holds) in enumerate(zip(args, of_arguments, strict=True))
        for label in _labels(arg, functools.partial(follower.number, "argument", number), holds)
    ]
    results, after = follower.follow(traced.jaxpr, given)
    for var, label, begun in zip(traced.jaxpr.invars, after, given, strict=True):
        if label.holds != begun.holds:
            follower.note("reference among the arguments", in_short(var), label)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    shown = [
        Shown(path, kind(follower.told(label)), in_short(var), where(traced.jaxpr, var))
        for path, label, var in zip(paths, results, traced.jaxpr.outvars, strict=True)
    ]
    seen = [
        Shown(name, kind(follower.told(label)), "", line)
        for (name, line), label in follower.seen.items()
    ]
    found = follower.closed_over, follower.joined, follower.redrawn, follower.uncounted
    return InformationFlow((*shown, *seen), *map(tuple, found))


def _labels(arg: PyTree, numbered: Callable[..., int], holds: Holds) -> list[Label]:
    """Of each leaf of an argument: that of the argument, and secrets of the noise stages in it.

    A noise stage's state is what has an imprint, also where flax.nnx made a dictionary of it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arg)
    paths = [[getattr(k, "name", getattr(k, "key", k)) for k in path] for path, _ in leaves]
    stages = {tuple(path[: path.index("imprint")]) for path in paths if "imprint" in path}
    labels = []
    for place, (path, (_, leaf)) in enumerate(zip(paths, leaves, strict=True)):
        within = [n for n in range(len(path)) if tuple(path[:n]) in stages]
        secret = any(path[n] not in ("count", "imprint") for n in within)
        own = holds | Holds.SECRET if secret else holds
        if Holds.PRIVATE in own:
            labels.append(Label(own, LEADING if jnp.ndim(leaf) else None))
        else:
            labels.append(Label(own, number=numbered(place, jnp.shape(leaf)), entries=GIVEN))
    return labels


def _check_pure(args: PyTree) -> None:
    """Raises where arguments are objects of flax.nnx, whose values a function may write to."""

    def is_object(x: object) -> bool:
        return not nnx_kinds(x).isdisjoint({"Pytree", "Variable"})

    found = [x for x in jax.tree.leaves(args, is_leaf=is_object) if is_object(x)]
    if found:
        raise TypeError(
            f"an argument is, or has in it, a flax.nnx {type(found[0]).__name__}, which fn may "
            "write to without returning it. Give a function of values: of graph, states = "
            "nnx.split((model, optimizer)) one that gets nnx.as_pure(states), calls "
            "model, optimizer = nnx.merge(graph, states) and the step, and returns "
            "nnx.as_pure(nnx.state((model, optimizer)))"
        )
