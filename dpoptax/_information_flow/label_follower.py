"""Follows labels through a traced program, equation by equation."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dpoptax._information_flow import axis_rules, example_axes
from dpoptax._information_flow.derivations import Derivations, ProgramPath
from dpoptax._information_flow.entry_facts import (
    UNKNOWN_FACTS,
    clamped_rows,
    folded_entries,
    indices_are_unique,
    is_integer,
    is_key,
    result_entries,
)
from dpoptax._information_flow.labels import (
    EMPTY_LABEL,
    PRIVATE_DATA,
    Content,
    Label,
    LoopLabels,
    apply_mark,
    condition_label,
    join_labels,
    varying_axes,
)
from dpoptax._information_flow.noise_draws import NoiseDraws
from dpoptax._information_flow.source_lines import quoted_line, source_line, uses_own_table
from dpoptax._rounding.device_sums import names_of
from dpoptax._support.argument_checks import is_hashable
from dpoptax._support.jaxprs import HIJAX_CALL, PROGRAM_CALLS, scan_parts, subprograms, type_of
from dpoptax._support.marks import CLIPPED, EXAMPLES, FOLDED, NOISE, RELEASE, SEALED

# Operations that return their operands.
_IDENTITY_PRIMITIVES = {
    *("copy", "copy_p", "device_put", "layout_constraint", "mesh_cast", "optimization_barrier"),
    *("pvary", "random_clone", "reshard", "sharding_constraint"),
}
# Data that a clip expects at its entry and at its exit.
_MARK_CONTENT = {EXAMPLES: Content.PRIVATE, CLIPPED: Content.EXAMPLES}
_JOIN_CAUSES = {EXAMPLES: "an argument without a row for each example", CLIPPED: "another clip"}
# Private or clipped data that an operation combines are no longer on a path to a release, except by
# the noise.
_LEFT = Content.PRIVATE | Content.CLIPPED
_SECOND_TURN = "another turn of a loop"
# Maps the labels of a loop's operands to those of a turn's results, and of the operands after it.
_FollowTurn: TypeAlias = Callable[[list[Label], bool], tuple[list[Label], list[Label]]]

LARGE_SIZE = 100
"""Closed-over arrays of at least this size are reported, since they may be data."""


class LabelFollower:
    """Follows labels from the operands of a program to its results.

    Attributes:
      seen: values shown other than as a result, by name and line.
      closed_over: types of large arrays among the constants, each once, in order.
      joined: operations that combined examples before a clip, with their lines, in the same way.
      redrawn: lines that may repeat the noise of another line, in the same way.
      clamped: numbers of private rows that secret indices are clamped to, in the same way.
    """

    def __init__(self, constants: Mapping[Var, bytes]) -> None:
        """Starts with the bits of the small arrays that the program closes over."""
        self._constants = constants
        self.seen: dict[tuple[str, str], Label] = {}
        self.closed_over: dict[str, None] = {}
        self.joined: dict[str, None] = {}
        self.redrawn: dict[str, None] = {}
        self.clamped: dict[str, None] = {}
        self._derivations = Derivations()
        self.number = self._derivations.number
        self._draws = NoiseDraws(self._derivations)
        # For each release, the axes along which keys differ: axes of a jax.vmap, and mesh axes.
        self._keys: dict[Hashable, frozenset[Hashable]] = {}
        # The equation being followed, after its enclosing ones and the branches they took.
        self._within: list[JaxprEqn | Jaxpr | str] = []
        self._expansions: dict[int, Jaxpr] = {}

    def note(self, name: str, where: str, label: Label) -> None:
        """Records that a value is shown other than as a result."""
        self.seen[name, where] = join_labels((self.seen.get((name, where), label), label))

    def follow(
        self, jaxpr: Jaxpr, given: Sequence[Label], around: Label = EMPTY_LABEL
    ) -> list[Label]:
        """Returns the labels of a program's results.

        Args:
          jaxpr: the program.
          given: the labels of its arguments.
          around: the label of the values that decide whether it runs.
        """
        labels = {
            var: typed_label(
                Label(number=self.number("constant", self._constants.get(var, var))), var
            )
            for var in jaxpr.constvars
        }
        large = [var for var in jaxpr.constvars if getattr(var.aval, "size", 0) >= LARGE_SIZE]
        self.closed_over |= {
            var.aval.str_short(): None for var in large if not _is_table(jaxpr, var)
        }
        labels |= dict(zip(jaxpr.invars, given, strict=True))

        def label(atom: Var | Literal) -> Label:
            if not isinstance(atom, Literal):
                return labels[atom]
            # Whole numbers are equal in all integer dtypes, so that indices can be compared.
            whole = is_integer(atom)
            # Other literals are only equal with equal types.
            kind, value = ("integer", int(atom.val)) if whole else (str(atom.aval), atom.val)
            return Label(number=self.number("literal", kind, str(value)))

        for eqn in jaxpr.eqns:
            read = [label(atom) for atom in eqn.invars]
            with self._enter(eqn):
                results = self._step(eqn, read, around)
                for i, (var, each) in enumerate(zip(eqn.outvars, results, strict=True)):
                    numbered = self._numbered(condition_label(each, around), eqn, read, i)
                    labels[var] = typed_label(numbered, var)
        return [label(atom) for atom in jaxpr.outvars]

    @contextlib.contextmanager
    def _enter(self, of: JaxprEqn | Jaxpr | str) -> Iterator[None]:
        self._within.append(of)
        yield
        self._within.pop()

    def _step(self, eqn: JaxprEqn, read: list[Label], around: Label) -> list[Label]:
        """Returns the labels of an equation's results."""
        name = eqn.primitive.name
        if name == "name":  # the primitive of `mark`
            return [self._marked(eqn, read[0])]
        # With a derivative, the functions of seals have more operands.
        sealed = eqn.params.get("name") == SEALED and len(read) == len(eqn.outvars)
        if name in _IDENTITY_PRIMITIVES or sealed:
            return read
        if name == "scan":
            return self._scan(eqn, read, around)
        if name == "while":
            return self._while(eqn, read, around)
        if name == "cond":
            return self._cond(eqn, read, around)
        if name == "shard_map":
            return self._shard_map(eqn, read, around)
        # `Derivations` knows `fold_in` as a hash. Inside the function it would only see arithmetic.
        if eqn.params.get("name") == FOLDED:
            return [self._folded(eqn, read)]
        inner = [self._expanded(eqn)] if name == HIJAX_CALL else subprograms(eqn.params)
        called = len(inner) == 1 and len(inner[0].invars) == len(read)
        if name in {HIJAX_CALL, *PROGRAM_CALLS} and called:
            return self.follow(inner[0], read, around)
        if "callback" in name or name in ("check", "debug_print", "outfeed"):
            self.note(name, self._line(), join_labels((around, *read)))
        # Other code may read a reference, except one inside a kernel, which has no such label.
        references = [x for v, x in zip(eqn.invars, read, strict=True) if is_reference(v)]
        if name != "get" and any(Content.REFERENCE in label.holds for label in references):
            self.note("jax.Ref", self._line(), join_labels((around, *read)))
        results = self._applied(eqn, read)
        together = dataclasses.replace(join_labels(read), rows=None, number=None)
        for each in inner:  # an unknown call may read and show everything, and run many times
            self.follow(each, [together] * len(each.invars), around)
            # At a second place, so that a draw inside meets itself as another draw of its key.
            with self._enter(_SECOND_TURN):
                self.follow(each, [together] * len(each.invars), around)
        return results

    def _folded(self, eqn: JaxprEqn, read: list[Label]) -> Label:
        """Returns the label of keys that numbers were folded into."""
        numbers = tuple(label.number for label in read)
        folded = None if None in numbers else self.number("random_fold_in", (), numbers, 0)
        typed = is_key(eqn.outvars[0])  # each entry is a key
        facts = folded_entries(eqn, [label.entries for label in read]) if typed else UNKNOWN_FACTS
        return dataclasses.replace(join_labels(read), number=folded, entries=facts)

    def _marked(self, eqn: JaxprEqn, label: Label) -> Label:
        # A mark's name ends with the rank of the array. `jax.vmap` added all further axes.
        name, _, axes = eqn.params["name"].partition("/")
        mapped = range(len(type_of(eqn.invars[0]).shape) - int(axes)) if axes.isdigit() else ()
        # Under jax.vmap the leading axis is not the batch, so rows are not known.
        if name == EXAMPLES and mapped:
            label = dataclasses.replace(label, rows=None, joined=f"jax.vmap in {self._line()}")
        # Marks of one clip or noise stage have the same path, except for their own equations.
        *around, _ = here = self._path()
        clip = tuple(around)
        after = apply_mark(label, name, clip)
        if Content.PRIVATE in after.holds and label.holds & PRIVATE_DATA == _MARK_CONTENT.get(name):
            self.joined[label.joined or _JOIN_CAUSES[name]] = None
        again = False
        apart = label.varying
        # Along a mapped axis there are several releases, and several keys if these are distinct.
        if name == RELEASE or label.entries.distinct:
            apart = apart.union(("jax.vmap", axis) for axis in mapped)
        if name == NOISE:
            self._keys[clip] = apart
            again = self._draws.repeats(label.number, here, single=not mapped)
        elif name == RELEASE and label.has_data:  # several releases would share one noise
            again = not apart <= self._keys.get(clip, apart)
        if again:
            self.redrawn[self._line()] = None
            holds, left = after.holds | Content.PRIVATE, after.left or self._line(quoted_line)
            after = dataclasses.replace(after, holds=holds, left=left)
        return after

    def _numbered(self, label: Label, eqn: JaxprEqn, read: list[Label], place: int) -> Label:
        """Returns the label of a result, with a number if it has none."""
        if label.has_data or label.number is not None:
            return label
        # A release has new noise: equal operands elsewhere do not give an equal result.
        of = self._path() if Content.RELEASED in label.holds else self._run_identity(eqn, read)
        return dataclasses.replace(label, number=self.number(of, place))

    def _run_identity(self, eqn: JaxprEqn, read: list[Label]) -> tuple[Hashable, ...]:
        """Returns an identity of a run, equal for equal public inputs and new noise."""
        # Public values in a loop do not depend on its private operands, so all of these count as
        # equal.
        numbers = ["data" if label.has_data else label.number for label in read]
        return self._computation(eqn, numbers) or self._path()

    def _path(self) -> ProgramPath:
        return tuple(map(id, self._within))

    def _applied(self, eqn: JaxprEqn, read: list[Label]) -> list[Label]:
        """Returns the labels of the results of an operation without a known program."""
        numbers = [label.number for label in read]
        together = join_labels(read)
        together = dataclasses.replace(together, varying=varying_axes(eqn, together.varying))
        if not eqn.outvars:  # such as a callback without results
            return []
        if not together.has_data:
            what, of = self._computation(eqn, numbers), [label.entries for label in read]
            facts = result_entries(eqn, of, numbers, self._derivations)
            return [
                dataclasses.replace(together, number=what and self.number(*what, i), entries=each)
                for i, each in enumerate(facts)
            ]
        if eqn.primitive.name == "gather":
            self._note_clamped(eqn, *read[:2])
            # Indices that may repeat give no rows of one example each.
            if not indices_are_unique(eqn, read[1].entries):
                numbers[1] = None
        # Only operands with data have rows.
        given = {i: label.rows for i, label in enumerate(read) if label.has_data}
        found = dataclasses.replace(together, rows=axis_rules.result_axes(eqn, given, numbers))
        if found.rows is None and not found.joined:
            found = dataclasses.replace(found, joined=f"{eqn.primitive.name} in {self._line()}")
        if found.rows is None and not found.left and found.holds & _LEFT:
            found = dataclasses.replace(found, left=self._line(quoted_line))
        return [found] * len(eqn.outvars)

    def _note_clamped(self, eqn: JaxprEqn, rows: Label, indices: Label) -> None:
        """Records a gather of private rows that clamps secret indices."""
        drawn = rows.rows == example_axes.LEADING_AXIS and Content.SECRET in indices.holds
        if drawn and (number := clamped_rows(eqn)) is not None:
            self.clamped[f"{number:,} rows in {self._line()}"] = None

    def _computation(
        self, eqn: JaxprEqn, numbers: Sequence[Hashable]
    ) -> tuple[Hashable, ...] | None:
        """Returns an identity of a computation, equal for equal results, or `None`."""
        name, parameters = eqn.primitive.name, sorted(eqn.params.items())
        if name == "random_split":  # the key's own axes come before the new one
            parameters.append(("axes", len(type_of(eqn.invars[0]).shape)))
        what = name, tuple(parameters), tuple(numbers)
        # The results of these differ from call to call.
        drawn = eqn.effects or name == "rng_uniform"
        return None if drawn or None in numbers or not is_hashable(what) else what

    def _cond(self, eqn: JaxprEqn, read: list[Label], around: Label) -> list[Label]:
        decides, *operands = read
        inner = condition_label(around, decides)
        branches, programs = [], subprograms(eqn.params)
        for each in programs:
            self._draws.add_branch(each)
            with self._enter(each):
                branches.append(self.follow(each, operands, inner))
        results = [self._choice_label(programs, each) for each in zip(*branches, strict=True)]
        # The results show which branch ran.
        return [condition_label(each, decides) for each in results]

    def _choice_label(self, branches: Sequence[Jaxpr], labels: Sequence[Label]) -> Label:
        """Returns the label of a value computed by one of several branches."""
        found, numbers = join_labels(labels), [label.number for label in labels]
        if found.has_data or found.number is not None or None in numbers:
            return found
        made = zip(map(id, branches), numbers, strict=True)
        return dataclasses.replace(found, number=self.number("either", self._path(), *made))

    def _scan(self, eqn: JaxprEqn, read: list[Label], around: Label) -> list[Label]:
        # The operands are constants, the initial carry, and arrays that are cut into slices.
        first, number = scan_parts(eqn)
        turns, last = self._repeats(eqn, read), first + number

        def turn(now: list[Label], other: bool) -> tuple[list[Label], list[Label]]:
            """Returns the labels of a turn's results, and of the loop's operands after it."""
            carry = turns.next_turn(now[first:last]) if other else now[first:last]
            slices = [
                turns.enter(label, example_axes.slice_scan, i, other=other)
                for i, label in enumerate(now[last:])
            ]
            given = [*now[:first], *carry, *slices]
            results = self.follow(eqn.params["jaxpr"].jaxpr, given, around)
            carried = turns.carry(carry, results[:number], eqn.params["length"])
            return [*carried, *results[number:]], [*now[:first], *carried, *now[last:]]

        results = self._turns(turn, read, several=eqn.params["length"] > 1)
        stacks = [
            turns.leave(x, example_axes.stack_turns, i) for i, x in enumerate(results[number:])
        ]
        return [*turns.last_turn(results[:number]), *stacks]

    def _while(self, eqn: JaxprEqn, read: list[Label], around: Label) -> list[Label]:
        # The operands are constants of the test, constants of the body, and the initial carry.
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        turns, last = self._repeats(eqn, read), first + second
        test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr

        def turn(now: list[Label], other: bool) -> tuple[list[Label], list[Label]]:
            """Returns the labels of a turn's results, and of the loop's operands after it."""
            carry = turns.next_turn(now[last:]) if other else now[last:]
            (decides,) = self.follow(test, [*now[:first], *carry], around)
            inner = condition_label(around, decides)
            results = self.follow(body, [*now[first:last], *carry], inner)
            # The results show how many turns there were.
            results = [condition_label(each, decides) for each in results]
            carried = turns.carry(carry, results, math.inf)
            return carried, [*now[:last], *carried]

        return turns.last_turn(self._turns(turn, read, several=True))

    def _turns(self, turn: _FollowTurn, read: list[Label], *, several: bool) -> list[Label]:
        """Returns the labels of the results of any turn: one more turn leaves them unchanged.

        Whether two turns draw the same noise depends on the carried values. So turns are first
        followed without recording draws, until the labels are stable. If there are `several` turns,
        two are then followed, with different names for the values that turns change.
        """
        with self._draws.suspended() as judged:
            now, (results, after) = read, turn(read, False)
            # Labels only grow, so this ends.
            while after != now:
                now, (results, after) = after, turn(after, False)
        # Inside a loop that is itself followed without recording, draws are judged later.
        before = self._draws.count()
        # Ends with `break`. Without judging, the labels above are the result.
        while judged:
            # The second turn may have changed the labels. Its draws are then judged again.
            self._draws.forget(before)
            results, after = turn(now, False)
            if after == now and several:
                with self._enter(_SECOND_TURN):
                    others, after = turn(now, True)
                results = [
                    dataclasses.replace(one, holds=one.holds | other.holds)
                    for one, other in zip(results, others, strict=True)
                ]
            if after == now:
                break
            now = after
        return results

    def _shard_map(self, eqn: JaxprEqn, read: list[Label], around: Label) -> list[Label]:
        devices, (jaxpr,) = self._repeats(eqn, read), subprograms(eqn.params)
        into, out_of = eqn.params["in_specs"], eqn.params["out_specs"]
        mapped: frozenset[Hashable] = eqn.params["newly_manual_axes"]
        given = []
        for i, (label, spec) in enumerate(zip(read, into, strict=True)):
            # Devices get different parts of an array along the mesh axes that it is split over.
            part = devices.enter(label, functools.partial(example_axes.split_devices, spec=spec), i)
            given.append(
                dataclasses.replace(part, varying=part.varying.union(*map(names_of, spec)))
            )
        found = self.follow(jaxpr, given, around)
        results = []
        for i, (label, spec) in enumerate(zip(found, out_of, strict=True)):
            whole = devices.leave(label, functools.partial(example_axes.join_devices, spec=spec), i)
            results.append(dataclasses.replace(whole, varying=whole.varying - mapped))
        return results

    def _repeats(self, eqn: JaxprEqn, read: list[Label]) -> LoopLabels:
        name = f"{eqn.primitive.name} in {self._line()}"
        return LoopLabels(eqn, read, name, self._derivations, self._run_identity(eqn, read))

    def _expanded(self, eqn: JaxprEqn) -> Jaxpr:
        """Returns the program of a hijax operation, one object for each equation.

        Places in loops are identified by the objects on the way.
        """
        operation = eqn.params["_prim"]

        def program(*operands: jax.Array) -> Any:
            return operation.expand(*jax.tree.unflatten(operation.in_tree, operands))

        if id(eqn) not in self._expansions:
            shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(type_of, eqn.invars)]
            self._expansions[id(eqn)] = jax.make_jaxpr(program)(*shapes).jaxpr
        return self._expansions[id(eqn)]

    def _line(self, text: Callable[[JaxprEqn], str] = source_line) -> str:
        """Returns the line of the equation, or of the enclosing call if it has none."""
        # From the innermost equation outward.
        around = [each for each in reversed(self._within) if isinstance(each, JaxprEqn)]
        return next(filter(None, map(text, around)), "") or source_line(around[0], inner=True)


def _is_table(jaxpr: Jaxpr, var: Var) -> bool:
    """Returns whether a constant is a table of a noise generator, and used for nothing else."""
    uses = [eqn for eqn in jaxpr.eqns if any(atom is var for atom in eqn.invars)]
    shown = any(atom is var for atom in jaxpr.outvars)
    return bool(uses) and not shown and all(map(uses_own_table, uses))


def typed_label(label: Label, var: Var) -> Label:
    """Returns the label of a variable, which depends on its type for references."""
    if not is_reference(var):
        return label
    return dataclasses.replace(label, holds=label.holds | Content.REFERENCE)


def is_reference(atom: Var | Literal) -> bool:
    """Returns whether a value is a `jax.Ref`."""
    return hasattr(atom.aval, "inner_aval")
