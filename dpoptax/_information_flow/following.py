"""Following labels through a traced program, equation by equation."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace.derived_values import inside
from dpoptax._ghost_clipping.trace.example_separation import CALLS, HIDDEN
from dpoptax._ghost_clipping.trace.program import scan_parts, type_of
from dpoptax._information_flow import example_axes, operations
from dpoptax._information_flow.derivations import Derivations, Place
from dpoptax._information_flow.indices import UNKNOWN, entries, is_integer, name_each_once
from dpoptax._information_flow.labels import DATA, NOTHING, Holds, Label, decided, either, marked
from dpoptax._information_flow.random_draws import Draws
from dpoptax._information_flow.repeats import Repeats, apart_behind, manual
from dpoptax._information_flow.selections import Selections
from dpoptax._information_flow.source_lines import in_short, line
from dpoptax._marks import CLIPPED, COUNTED, EXAMPLES, FOLDED, NOISE, RELEASE, SELECTED
from dpoptax._pricing.checks import is_hashable

# Primitives that call a program with their operands, in order, and return its results.
_CALLS = {*CALLS, "custom_vjp_call_jaxpr", "custom_vmap_call", "eval_jaxpr"}
# Operations that return what they get.
_SAME = {
    *("copy", "copy_p", "device_put", "layout_constraint", "mesh_cast", "optimization_barrier"),
    *("pvary", "random_clone", "reshard", "sharding_constraint"),
}
# What goes into a clip, and comes out of it.
_INTO = {EXAMPLES: Holds.PRIVATE, CLIPPED: Holds.EXAMPLES}
_OTHERWISE = {EXAMPLES: "an argument without a row for each example", CLIPPED: "another clip"}
# What runs a program once, whenever it runs.
_ONCE = {HIDDEN, *_CALLS, "shard_map"}
_OTHER_TURN = "another turn of a loop"
_Turn = Callable[[list[Label], bool], tuple[list[Label], list[Label]]]

LARGE = 100
"""Numbers from which an array that a function closes over is worth a word: it may be data."""


class Follower:
    """Follows labels from the operands of a program to its results.

    Attributes:
      seen: what is shown other than as a result, by name and line.
      closed_over: types of large arrays among the constants, each once, in order.
      joined: operations that joined examples in front of a clip, with their lines, likewise.
      redrawn: the lines where noise may be drawn that another line drew, likewise.
    """

    def __init__(self, constants: Mapping[Var, bytes]) -> None:
        """Begins with the bits of what the program closes over, where these are few."""
        self._constants = constants
        self.seen: dict[tuple[str, str], Label] = {}
        self.closed_over: dict[str, None] = {}
        self.joined: dict[str, None] = {}
        self.redrawn: dict[str, None] = {}
        self._derivations = Derivations()
        self.number = self._derivations.number
        self._draws = Draws(self._derivations)
        self._selections = Selections(self._derivations)
        # Of a release what has keys of its own: the points of a jax.vmap, by its axis, and devices,
        # by the axes of their mesh.
        self._keys: dict[Hashable, frozenset[Hashable]] = {}
        # The operation that is followed, behind those around it and the branches that these took.
        self._within: list[JaxprEqn | Jaxpr | str] = []
        self._expansions: dict[int, Jaxpr] = {}

    def note(self, name: str, where: str, label: Label) -> None:
        """That something is shown other than as a result."""
        self.seen[name, where] = either((self.seen.get((name, where), label), label))

    def told(self, label: Label) -> Holds:
        """What a value tells of, once all is followed: what no stage counted is private."""
        counted = self._selections.are_counted(label.selections)
        return label.holds if counted else label.holds | Holds.PRIVATE

    @property
    def uncounted(self) -> dict[str, None]:
        """The lines that select rows for a release that is not surely counted, each once."""
        return self._selections.uncounted

    def follow(
        self, jaxpr: Jaxpr, given: Sequence[Label], around: Label = NOTHING
    ) -> tuple[list[Label], list[Label]]:
        """The labels of a program's results, and of its arguments after it.

        The latter are other ones than before where the arguments are references, and written to.

        Args:
          jaxpr: the program.
          given: the labels of its arguments.
          around: that of what decides whether it runs.
        """
        labels = {
            var: Label(number=self.number("constant", self._constants.get(var, var)))
            for var in jaxpr.constvars
        }
        large = [var for var in jaxpr.constvars if getattr(var.aval, "size", 0) >= LARGE]
        self.closed_over |= {in_short(var): None for var in large}
        labels |= dict(zip(jaxpr.invars, given, strict=True))

        def label(atom: Var | Literal) -> Label:
            if not isinstance(atom, Literal):
                return labels[atom]
            whole = is_integer(atom)
            kind, value = ("integer", int(atom.val)) if whole else (str(atom.aval), atom.val)
            return Label(number=self.number("literal", kind, str(value)))

        for eqn in jaxpr.eqns:
            read = [label(atom) for atom in eqn.invars]
            with self._inside(eqn):
                results, written = self._step(eqn, read, around)
                for i, (var, each) in enumerate(zip(eqn.outvars, results, strict=True)):
                    labels[var] = self._numbered(decided(each, around), eqn, read, i)
            for atom, after in zip(eqn.invars, written, strict=True):
                if isinstance(atom, Var) and is_reference(atom):
                    labels[atom] = decided(either((labels[atom], after)), around)
        for var in filter(is_reference, jaxpr.constvars):
            self.note("reference closed over", "", labels[var])
        return [label(atom) for atom in jaxpr.outvars], [labels[var] for var in jaxpr.invars]

    @contextlib.contextmanager
    def _inside(self, of: JaxprEqn | Jaxpr | str) -> Iterator[None]:
        self._within.append(of)
        yield
        self._within.pop()

    def _step(
        self, eqn: JaxprEqn, read: list[Label], around: Label
    ) -> tuple[list[Label], list[Label]]:
        """The labels of an equation's results, and of its operands after it."""
        name = eqn.primitive.name
        if name == "name":
            return [self._marked(eqn, read[0])], read
        if name in _SAME:
            return read, read
        if name == "scan":
            return self._scan(eqn, read, around)
        if name == "while":
            return self._while(eqn, read, around)
        if name == "cond":
            return self._cond(eqn, read, around)
        if name == "shard_map":
            return self._shard_map(eqn, read, around)
        if eqn.params.get("name") == FOLDED:
            return [self._folded(read)], read
        inner = [self._expanded(eqn)] if name == HIDDEN else inside(eqn.params)
        called = len(inner) == 1 and len(inner[0].invars) == len(read)
        if name in {HIDDEN, *_CALLS} and called:
            return self.follow(inner[0], read, around)
        if "callback" in name or name in ("check", "debug_print", "outfeed"):
            self.note(name, self._line(), either((around, *read)))
        results = self._applied(eqn, read)
        # Also of references, into which each turn of a loop may have written rows of its own.
        together = dataclasses.replace(either(read), rows=None, number=None)
        for each in inner:  # what is called otherwise may read all, tell all, and run many times
            self.follow(each, [together] * len(each.invars), around)
            with self._inside(_OTHER_TURN):
                self.follow(each, [together] * len(each.invars), around)
        return results, [together] * len(read)

    def _folded(self, read: list[Label]) -> Label:
        """That of a key that was made of a key and a number."""
        numbers = tuple(label.number for label in read)
        folded = None if None in numbers else self.number("random_fold_in", (), numbers, 0)
        return dataclasses.replace(either(read), number=folded, entries=UNKNOWN)

    def _marked(self, eqn: JaxprEqn, label: Label) -> Label:
        name, _, axes = eqn.params["name"].partition("/")
        mapped = range(len(type_of(eqn.invars[0]).shape) - int(axes)) if axes.isdigit() else ()
        if name == EXAMPLES and mapped:
            label = dataclasses.replace(label, rows=None, joined=f"jax.vmap in {self._line()}")
        *around, _ = here = self._here()
        clip = tuple(around)
        after = marked(label, name, clip)
        if Holds.PRIVATE in after.holds and label.holds & DATA == _INTO.get(name):
            self.joined[label.joined or _OTHERWISE[name]] = None
        again = False
        apart = label.apart
        if name == RELEASE or label.entries.distinct:
            apart = apart.union(("jax.vmap", axis) for axis in mapped)
        if name == NOISE:
            self._keys[clip] = apart
            self._selections.draw(clip, label.number)
            again = self._draws.again(label.number, here, single=not mapped)
        elif name == RELEASE and label.has_data:  # many with the noise of one
            again = not apart <= self._keys.get(clip, apart)
        elif name == SELECTED:
            selection = self._selections.select(clip, self._optional(), self._line())
            after = dataclasses.replace(after, selections=after.selections | {selection})
        elif name == COUNTED:
            self._selections.count(clip, self._optional())
        if again:
            self.redrawn[self._line()] = None
            after = dataclasses.replace(after, holds=after.holds | Holds.PRIVATE)
        return after

    def _numbered(self, label: Label, eqn: JaxprEqn, read: list[Label], place: int) -> Label:
        """A result of an operation, with a number if it has none."""
        if label.has_data or label.number is not None:
            return label
        of = self._here() if Holds.RELEASED in label.holds else self._run(eqn, read)
        return dataclasses.replace(label, number=self.number(of, place))

    def _run(self, eqn: JaxprEqn, read: list[Label]) -> tuple[Hashable, ...]:
        """The same for runs that make the same of what is public, where all noise is another."""
        numbers = ["data" if label.has_data else label.number for label in read]
        return self._computed(eqn, numbers) or self._here()

    def _optional(self) -> Place:
        """The loops, branches and unknown calls around it: what need not run, or not once."""
        return tuple(
            id(each)
            for each in self._within[:-1]
            if isinstance(each, Jaxpr)
            or (isinstance(each, JaxprEqn) and each.primitive.name not in _ONCE)
        )

    def _here(self) -> Place:
        return tuple(map(id, self._within))

    def _applied(self, eqn: JaxprEqn, read: list[Label]) -> list[Label]:
        """The labels of the results of an operation on all that it reads."""
        numbers = [label.number for label in read]
        together = either(read)
        together = dataclasses.replace(together, apart=apart_behind(eqn, together.apart))
        if not eqn.outvars:  # as of a callback that returns nothing
            return []
        if not together.has_data:
            what, of = self._computed(eqn, numbers), [label.entries for label in read]
            of_each = entries(eqn, of, numbers, self._derivations)
            return [
                dataclasses.replace(together, number=what and self.number(*what, i), entries=each)
                for i, each in enumerate(of_each)
            ]
        if eqn.primitive.name == "gather" and not name_each_once(eqn, read[1].entries):
            numbers[1] = None
        given = {i: label.rows for i, label in enumerate(read) if label.has_data}
        found = dataclasses.replace(together, rows=operations.after(eqn, given, numbers))
        if found.rows is None and not found.joined:
            found = dataclasses.replace(found, joined=f"{eqn.primitive.name} in {self._line()}")
        return [found] * len(eqn.outvars)

    def _computed(self, eqn: JaxprEqn, numbers: Sequence[Hashable]) -> tuple[Hashable, ...] | None:
        """What an operation computes: equal for equal results; None where nothing says so."""
        name, parameters = eqn.primitive.name, sorted(eqn.params.items())
        if name == "random_split":  # behind the axes of keys
            parameters.append(("axes", len(type_of(eqn.invars[0]).shape)))
        what = name, tuple(parameters), tuple(numbers)
        drawn = eqn.effects or name == "rng_uniform"
        return None if drawn or None in numbers or not is_hashable(what) else what

    def _cond(
        self, eqn: JaxprEqn, read: list[Label], around: Label
    ) -> tuple[list[Label], list[Label]]:
        decides, *operands = read
        inner = decided(around, decides)
        branches, programs = [], inside(eqn.params)
        for each in programs:
            self._draws.add_branch(each)
            with self._inside(each):
                branches.append(self.follow(each, operands, inner))
        results, written = (
            [self._chosen(programs, labels) for labels in zip(*each, strict=True)]
            for each in zip(*branches, strict=True)
        )
        return [decided(each, decides) for each in results], [decides, *written]

    def _chosen(self, branches: Sequence[Jaxpr], labels: Sequence[Label]) -> Label:
        """That of what one of the branches of a choice made."""
        found, numbers = either(labels), [label.number for label in labels]
        if found.has_data or found.number is not None or None in numbers:
            return found
        made = zip(map(id, branches), numbers, strict=True)
        return dataclasses.replace(found, number=self.number("either", self._here(), *made))

    def _scan(
        self, eqn: JaxprEqn, read: list[Label], around: Label
    ) -> tuple[list[Label], list[Label]]:
        first, number = scan_parts(eqn)
        turns, last = self._repeats(eqn, read), first + number

        def turn(now: list[Label], other: bool) -> tuple[list[Label], list[Label]]:
            """The labels behind a turn: of its results, and of what the loop reads."""
            carry = turns.other(now[first:last]) if other else now[first:last]
            slices = [
                turns.inner(label, example_axes.scanned, i, other=other)
                for i, label in enumerate(now[last:])
            ]
            given = [*now[:first], *carry, *slices]
            results, written = self.follow(eqn.params["jaxpr"].jaxpr, given, around)
            length = eqn.params["length"]
            carried = turns.carried(written[first:last], results[:number], length)
            behind = _written(eqn.invars[last:], now[last:], written[last:])
            return [*carried, *results[number:]], [*written[:first], *carried, *behind]

        results, now = self._turns(turn, read, several=eqn.params["length"] > 1)
        stacks = [turns.outer(x, example_axes.stacked, i) for i, x in enumerate(results[number:])]
        return [*turns.ended(results[:number]), *stacks], now

    def _while(
        self, eqn: JaxprEqn, read: list[Label], around: Label
    ) -> tuple[list[Label], list[Label]]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        turns, last = self._repeats(eqn, read), first + second
        test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr

        def turn(now: list[Label], other: bool) -> tuple[list[Label], list[Label]]:
            """The labels behind a turn: of its results, and of what the loop reads."""
            tested, used, carry = now[:first], now[first:last], now[last:]
            carry = turns.other(carry) if other else carry
            (decides,), _ = self.follow(test, [*tested, *carry], around)
            results, written = self.follow(body, [*used, *carry], decided(around, decides))
            results = [decided(each, decides) for each in results]
            carried = turns.carried(written[second:], results, math.inf)
            return carried, _alike(eqn.invars, [*tested, *written[:second], *carried])

        results, now = self._turns(turn, read, several=True)
        return turns.ended(results), now

    def _turns(
        self, turn: _Turn, read: list[Label], *, several: bool
    ) -> tuple[list[Label], list[Label]]:
        """What holds behind any turn of a loop: with what one makes, it makes no more.

        What it carries has to be known before it can be told whether two turns draw one noise. So
        turns are followed without that at first. Where there are `several`, another is followed
        with the last one, with other names for what turns change.
        """
        with self._draws.unjudged() as judged:
            now, (results, after) = read, turn(read, False)
            while after != now:
                now, (results, after) = after, turn(after, False)
        before = self._draws.count()
        while judged:
            self._draws.forget(before)
            results, after = turn(now, False)
            if after == now and several:
                with self._inside(_OTHER_TURN):
                    others, after = turn(now, True)
                results = [
                    dataclasses.replace(
                        one,
                        holds=one.holds | other.holds,
                        selections=one.selections | other.selections,
                    )
                    for one, other in zip(results, others, strict=True)
                ]
            if after == now:
                break
            now = after
        return results, now

    def _shard_map(
        self, eqn: JaxprEqn, read: list[Label], around: Label
    ) -> tuple[list[Label], list[Label]]:
        devices, (jaxpr,) = self._repeats(eqn, read), inside(eqn.params)
        into, out_of = eqn.params["in_specs"], eqn.params["out_specs"]
        given = []
        for i, (label, spec) in enumerate(zip(read, into, strict=True)):
            part = devices.inner(label, functools.partial(example_axes.split, spec=spec), i)
            given.append(
                dataclasses.replace(part, apart=part.apart.union(*map(example_axes.names, spec)))
            )
        found, written = self.follow(jaxpr, given, around)
        results = []
        for i, (label, spec) in enumerate(zip(found, out_of, strict=True)):
            whole = devices.outer(label, functools.partial(example_axes.united, spec=spec), i)
            results.append(dataclasses.replace(whole, apart=whole.apart - manual(eqn)))
        return results, _written(eqn.invars, read, written)

    def _repeats(self, eqn: JaxprEqn, read: list[Label]) -> Repeats:
        name = f"{eqn.primitive.name} in {self._line()}"
        return Repeats(eqn, read, name, self._derivations, self._run(eqn, read))

    def _expanded(self, eqn: JaxprEqn) -> Jaxpr:
        """The program of an operation; one for each, as places in loops go by what stands there."""
        operation = eqn.params["_prim"]

        def program(*operands: jax.Array) -> Any:
            return operation.expand(*jax.tree.unflatten(operation.in_tree, operands))

        if id(eqn) not in self._expansions:
            shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(type_of, eqn.invars)]
            self._expansions[id(eqn)] = jax.make_jaxpr(program)(*shapes).jaxpr
        return self._expansions[id(eqn)]

    def _line(self) -> str:
        """That of the operation, or of the call of a function that does not know its own."""
        around = [each for each in reversed(self._within) if isinstance(each, JaxprEqn)]
        return next(filter(None, map(line, around)), "") or line(around[0], inner=True)


def _written(
    atoms: Sequence[Var | Literal], before: Sequence[Label], after: Sequence[Label]
) -> list[Label]:
    """The labels of operands after a program that got parts of them."""
    return [
        either(each) if is_reference(atom) else each[0]
        for atom, each in zip(atoms, zip(before, after, strict=True), strict=True)
    ]


def _alike(atoms: Sequence[Var | Literal], labels: Sequence[Label]) -> list[Label]:
    """The labels of operands of which several may be one reference."""
    return [
        either(each for other, each in zip(atoms, labels, strict=True) if other is atom)
        if is_reference(atom)
        else label
        for atom, label in zip(atoms, labels, strict=True)
    ]


def is_reference(atom: Var | Literal) -> bool:
    """Whether it is a `jax.Ref`."""
    return hasattr(atom.aval, "inner_aval")
