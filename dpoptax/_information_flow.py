"""Which results of a step depend on private data, and whether all of it went through the noise."""

import dataclasses
import enum
import functools
import operator
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize

from dpoptax._bookkeeping.deriving import inside
from dpoptax._bookkeeping.explain import in_columns
from dpoptax._bookkeeping.program import scan_parts
from dpoptax._marks import EXAMPLES, RELEASE
from dpoptax._trees import PyTree, nnx_kinds

# Primitives that call a program with their operands, in order, and return its results.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"),
}

_LARGE = 100
"""Numbers from which an array that a function closes over is worth a word: it may be data."""


class _Holds(enum.Flag):
    """What a value may tell of."""

    NOTHING = 0
    RELEASED = enum.auto()
    SECRET = enum.auto()
    EXAMPLES = enum.auto()  # private data that a clip bounds the influence of
    PRIVATE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Shown:
    """One array that a function returns, or hands to Python while it runs.

    Attributes:
      path: where it is in the result, such as `[1][0].count`; or the name of the callback, or of a
        `jax.Ref` that the function writes to.
      kind: "public": no private data has a part in it. "released": private data has, through noise
        stages alone. "secret": it tells of a noise key, or of noise that was drawn. "private":
        private data reaches it around the noise.
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
    """

    shown: tuple[Shown, ...]
    closed_over: tuple[str, ...]

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
        for kind in ("released", "public"):
            number = sum(each.kind == kind for each in self.shown)
            rows += [(kind, f"{number} more", "", "")] if number else []
        table = in_columns([("kind", "result", "type", "computed in"), *rows])
        if self.closed_over:
            table += f"\nclosed over, taken for public: {', '.join(self.closed_over)}"
        return table


def information_flow(
    fn: Callable[..., Any], *args: PyTree, private_argnums: int | Sequence[int]
) -> InformationFlow:
    """Follows private data through a step: what of its results depends on it, other than by noise.

    `fn` is traced and not run. Each value of the program is private if an operand is; the branches
    of a `cond` and the rounds of a `while_loop` count as computed from what decides on them. A
    noise stage of this package (`gaussian_noise`, `correlated_noise`, …) makes of private what is
    released, if it has noise and a guarantee: with `noise_multiplier=0` it does not, nor does
    `geodp`. What tells of a noise key, or of the noise that `correlated_noise` keeps, is secret.

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
      private_argnums: which arguments are private, batch and mask as a rule.

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
    numbers = {private_argnums} if isinstance(private_argnums, int) else set(private_argnums)
    if not numbers <= set(range(len(args))):
        raise ValueError(
            f"private_argnums={private_argnums}: {len(args)} arguments were given, numbered from 0"
        )
    _check_pure(args)
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    given = [
        label
        for number, arg in enumerate(args)
        for label in _labels(arg, _Holds.PRIVATE if number in numbers else _Holds.NOTHING)
    ]
    follower = _Follower()
    results, after = follower.follow(traced.jaxpr, given)
    for var, holds, begun in zip(traced.jaxpr.invars, after, given, strict=True):
        if holds != begun:
            follower.note("reference among the arguments", _type(var), holds)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    shown = [
        Shown(path, _kind(holds), _type(var), _where(traced.jaxpr, var))
        for path, holds, var in zip(paths, results, traced.jaxpr.outvars, strict=True)
    ]
    seen = [Shown(name, _kind(holds), "", where) for (name, where), holds in follower.seen.items()]
    return InformationFlow((*shown, *seen), tuple(follower.closed_over))


class _Follower:
    """Follows labels from the operands of a program to its results."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], _Holds] = {}
        self.closed_over: dict[str, None] = {}  # in order, each once

    def note(self, name: str, where: str, holds: _Holds) -> None:
        """That something is shown other than as a result."""
        self.seen[name, where] = self.seen.get((name, where), holds) | holds

    def follow(
        self, jaxpr: Jaxpr, given: Sequence[_Holds], around: _Holds = _Holds.NOTHING
    ) -> tuple[list[_Holds], list[_Holds]]:
        """The labels of a program's results, and of its arguments after it.

        The latter are other ones than before where the arguments are references, and written to.

        Args:
          jaxpr: the program.
          given: the labels of its arguments.
          around: that of what decides whether it runs.
        """
        labels = dict.fromkeys(jaxpr.constvars, _Holds.NOTHING)
        large = [var for var in jaxpr.constvars if getattr(var.aval, "size", 0) >= _LARGE]
        self.closed_over |= {_type(var): None for var in large}
        labels |= dict(zip(jaxpr.invars, given, strict=True))

        def label(atom: Var | Literal) -> _Holds:
            return _Holds.NOTHING if isinstance(atom, Literal) else labels[atom]

        for eqn in jaxpr.eqns:
            read = [label(atom) for atom in eqn.invars]
            results, written = self._step(eqn, read, around)
            labels |= zip(eqn.outvars, (each | around for each in results), strict=True)
            for atom, holds in zip(eqn.invars, written, strict=True):
                if isinstance(atom, Var) and _is_reference(atom):
                    labels[atom] |= holds | around
        for var in filter(_is_reference, jaxpr.constvars):
            self.note("reference closed over", "", labels[var])
        return [label(atom) for atom in jaxpr.outvars], [labels[var] for var in jaxpr.invars]

    def _step(
        self, eqn: JaxprEqn, read: list[_Holds], around: _Holds
    ) -> tuple[list[_Holds], list[_Holds]]:
        """The labels of an equation's results, and of its operands after it."""
        name = eqn.primitive.name
        together = _union(read)
        if name == "name":
            return [_marked(together, eqn.params["name"])], read
        if name == "scan":
            return self._scan(eqn, read, around)
        if name == "while":
            return self._while(eqn, read, around)
        if name == "cond":
            decides, *operands = read
            branches = eqn.params["branches"]
            found = [self.follow(each.jaxpr, operands, around | decides) for each in branches]
            results, written = (
                [_union(labels) for labels in zip(*each, strict=True)]
                for each in zip(*found, strict=True)
            )
            return [each | decides for each in results], [decides, *written]
        if "callback" in name or name in ("debug_print", "outfeed"):
            self.note(name, _line(eqn), around | together)
        inner = inside(eqn.params)
        if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(read):
            return self.follow(inner[0], read, around)
        for each in inner:  # a program that is called otherwise may read all, and tell all
            self.follow(each, [together] * len(each.invars), around)
        return [together] * len(eqn.outvars), [together] * len(read)

    def _scan(
        self, eqn: JaxprEqn, read: list[_Holds], around: _Holds
    ) -> tuple[list[_Holds], list[_Holds]]:
        first, number = scan_parts(eqn)
        while True:
            results, written = self.follow(eqn.params["jaxpr"].jaxpr, read, around)
            after = _joined(read, written)
            after[first : first + number] = _joined(after[first : first + number], results[:number])
            if after == read:
                return results, read
            read = after

    def _while(
        self, eqn: JaxprEqn, read: list[_Holds], around: _Holds
    ) -> tuple[list[_Holds], list[_Holds]]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        tested, used, carry = read[:first], read[first : first + second], read[first + second :]
        while True:
            test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
            (decides,), _ = self.follow(test, [*tested, *carry], around)
            results, written = self.follow(body, [*used, *carry], around | decides)
            after = _joined([*used, *carry], written)
            later = _joined(after[second:], [each | decides for each in results])
            if (after[:second], later) == (used, carry):
                return carry, [*tested, *used, *carry]
            used, carry = after[:second], later


def _labels(arg: PyTree, holds: _Holds) -> list[_Holds]:
    """Of each leaf of an argument: that of the argument, and secrets of the noise stages in it.

    A noise stage's state is what has an imprint, also where flax.nnx made a dictionary of it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(arg)
    paths = [[getattr(k, "name", getattr(k, "key", k)) for k in path] for path, _ in leaves]
    stages = {tuple(path[: path.index("imprint")]) for path in paths if "imprint" in path}

    def is_secret(path: list[Any]) -> bool:
        within = (n for n in range(len(path)) if tuple(path[:n]) in stages)
        return any(path[n] not in ("count", "imprint") for n in within)

    return [holds | _Holds.SECRET if is_secret(path) else holds for path in paths]


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


def _union(labels: Sequence[_Holds]) -> _Holds:
    return functools.reduce(operator.or_, labels, _Holds.NOTHING)


def _joined(some: Sequence[_Holds], others: Sequence[_Holds]) -> list[_Holds]:
    return [a | b for a, b in zip(some, others, strict=True)]


def _marked(holds: _Holds, name: str) -> _Holds:
    if name == EXAMPLES and _Holds.PRIVATE in holds:
        return holds & ~_Holds.PRIVATE | _Holds.EXAMPLES
    if name == RELEASE:
        released = _Holds.RELEASED if _Holds.EXAMPLES in holds else _Holds.NOTHING
        return holds & (_Holds.PRIVATE | _Holds.RELEASED) | released
    return holds


def _kind(holds: _Holds) -> str:
    if holds & (_Holds.PRIVATE | _Holds.EXAMPLES):
        return "private"
    if _Holds.SECRET in holds:
        return "secret"
    return "released" if _Holds.RELEASED in holds else "public"


def _is_reference(atom: Var | Literal) -> bool:
    return hasattr(atom.aval, "inner_aval")


def _type(atom: Any) -> str:
    return atom.aval.str_short()


def _where(jaxpr: Jaxpr, atom: Var | Literal) -> str:
    """The line that computed a result, in the function that the step called for it."""
    for eqn in jaxpr.eqns:
        for index, out in enumerate(eqn.outvars):
            if atom is out:
                inner = inside(eqn.params)
                same = len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars)
                return (same and _where(inner[0], inner[0].outvars[index])) or _line(eqn)
    return ""


def _line(eqn: JaxprEqn) -> str:
    return pathlib.PurePath(summarize(eqn.source_info)).name
