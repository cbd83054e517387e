"""Reads a traced loss: which values are made of parameters alone, and where they meet data.

Every value of the program is either *derived* (a function of parameters and constants: the same
for all examples) or *private* (it may depend on the example). Where a derived value meets a
private one in an operation that `_uses` knows, that is a use. Anywhere else the parameters
behind it become *opaque*: the only way to their gradients is automatic differentiation.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.extend import core

from dpoptax import _uses, _views

_INLINE = {"jit", "pjit", "closed_call", "core_call"}
_ELEMENTWISE = {"add", "sub", "mul", "div"}
_REMAT = {"checkpoint", "remat", "remat2"}


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """An operation whose operands are all derived."""

    eqn: Any
    operands: tuple["Derived", ...]
    scans: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A value made of parameters and constants.

    `leaves` are the parameters that its gradient flows to; it `varies` if parameters go into it,
    be it behind a `stop_gradient`. It is a `view` of one parameter, or `tiles`, several such views
    side by side along an axis (counted with the axes of `scans`), or neither.

    Inside the body of a scan over a stack of parameters it stands for all steps at once: its
    array then has one leading axis for each scan named in `scans`, outermost first.
    """

    aval: Any
    leaves: frozenset[int] = frozenset()
    varies: bool = False
    scans: tuple[int, ...] = ()
    view: _views.View | None = None
    tiles: tuple[int, tuple[_views.View, ...]] | None = None
    leaf: int | None = None
    constant: Any = None
    source: Application | None = None
    index: int = 0
    alias: "Derived | None" = None


@dataclasses.dataclass(frozen=True, eq=False)
class Private:
    """A value that may depend on the example; `touched` where it may depend on parameters too."""

    aval: Any
    touched: bool = True


Value = Derived | Private


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """A derived value meeting data under a rule. `loops`: (length, stacked) of each scan around."""

    index: int
    rule: _uses.Rule
    value: Derived
    operand: Any
    output: Any
    loops: tuple[tuple[int, bool], ...]
    touched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output for one example, over all steps."""
        return (*(n for n, _ in self.loops), *self.output.shape)

    @property
    def layout(self) -> _uses.Layout:
        layout = self.rule.layout
        for length, stacked in reversed(self.loops):
            layout = layout.stacked(length) if stacked else layout
        return layout

    @property
    def positions(self) -> int:
        positions = self.rule.positions
        for length, stacked in self.loops:
            positions *= 1 if stacked else length
        return positions


@dataclasses.dataclass(eq=False)
class Block:
    """A straight list of steps, with its inputs and results."""

    inputs: list[Private]
    steps: list["Step"] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    def needs(self) -> set[tuple[Derived, bool]]:
        """The derived values read, each with whether gradients flow through the read."""
        found = {(v, True) for v in self.results if isinstance(v, Derived)}
        for step in self.steps:
            found |= {(v, step.use is None) for v in step.operands if isinstance(v, Derived)}
            if step.body is not None:
                found |= step.body.needs()
        return found

    def uses(self) -> list[Use]:
        found = []
        for step in self.steps:
            if step.use is not None:
                found.append(step.use)
            if step.body is not None:
                found.extend(step.body.uses())
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation that touches private values; a scan or a rematerialised call has a body."""

    eqn: Any
    operands: tuple[Value, ...]
    outputs: tuple[Private, ...]
    use: Use | None = None
    data: int = 0
    body: Block | None = None
    scan: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced loss, read.

    Attributes:
      block: the steps.
      parameters: the parameters' shapes and dtypes.
      uses: where they meet data under a rule.
      opaque: the parameters that meet data elsewhere, with the operations. Their per-example
        gradients come from automatic differentiation.
      elementwise: those among them that only scale and shift data of at least their own size
        (biases, scales, positions): nothing is cheaper than their per-example gradients.
      result_tree: the structure of (loss, aux).
    """

    block: Block
    parameters: tuple[Any, ...]
    uses: tuple[Use, ...]
    opaque: dict[int, tuple[str, ...]]
    elementwise: frozenset[int]
    result_tree: Any


class _Reader:
    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.opaque: dict[int, list[str]] = {}
        self.heavy: set[int] = set()
        self.uses = 0
        self.scans = 0

    def mark(self, values: Any, reason: str, reach: int = 0) -> None:
        """Notes that parameters meet data unseen, in an output of `reach` entries."""
        for value in values:
            if isinstance(value, Derived):
                for leaf in value.leaves:
                    reasons = self.opaque.setdefault(leaf, [])
                    if reason not in reasons:
                        reasons.append(reason)
                    if reason not in _ELEMENTWISE or self.parameters[leaf].size > reach:
                        self.heavy.add(leaf)

    def derive(self, eqn: Any, operands: tuple[Derived, ...]) -> list[Derived]:
        leaves = frozenset().union(*(v.leaves for v in operands))
        if eqn.primitive.name == "stop_gradient":
            leaves = frozenset()
        varies = any(v.varies for v in operands)
        scans = tuple(sorted({s for v in operands for s in v.scans}))
        source = Application(eqn, operands, scans)
        tiles = _tiles(eqn, operands)
        return [
            Derived(v.aval, leaves, varies, scans, view, tiles, source=source, index=i)
            for i, (v, view) in enumerate(
                zip(eqn.outvars, _views_after(eqn, operands), strict=True)
            )
        ]

    def read(self, jaxpr: Any, consts: list[Value], args: list[Value], loops: Any) -> Block:
        block = Block([v for v in args if isinstance(v, Private)])
        block.results = self.extend(block, jaxpr, [*consts, *args], loops)
        return block

    def extend(self, block: Block, jaxpr: Any, args: list[Value], loops: Any) -> list[Value]:
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def value(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return Derived(atom.aval, constant=atom.val)
            return names[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(value(v) for v in eqn.invars)
            for var, out in zip(eqn.outvars, self.step(block, eqn, operands, loops), strict=True):
                names[var] = out
        return [value(v) for v in jaxpr.outvars]

    def step(self, block: Block, eqn: Any, operands: Any, loops: Any) -> list[Value]:
        name = eqn.primitive.name
        if name in _INLINE:
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner, consts = _open(closed)
            return self.extend(block, inner, [*map(_constant, consts), *operands], loops)
        if not eqn.effects and all(isinstance(v, Derived) for v in operands):
            return list(self.derive(eqn, operands))
        touched = any(v.varies if isinstance(v, Derived) else v.touched for v in operands)
        outputs = tuple(Private(v.aval, touched) for v in eqn.outvars)
        if name == "scan":
            block.steps.append(self.scan(eqn, operands, outputs, loops))
        elif name in _REMAT:
            inner, consts = _open(eqn.params["jaxpr"])
            body = self.read(inner, [*map(_constant, consts)], list(operands), loops)
            block.steps.append(Step(eqn, operands, outputs, body=body))
            return [
                inside if isinstance(inside, Derived) else out
                for inside, out in zip(body.results, outputs, strict=True)
            ]
        else:
            block.steps.append(self.meet(eqn, operands, outputs, loops))
        return list(outputs)

    def is_part(self, value: Value) -> bool:
        """Whether a value is some of the entries of one parameter."""
        if not isinstance(value, Derived) or value.view is None:
            return False
        return math.prod(value.view.shape) < self.parameters[value.view.leaf].size

    def meet(self, eqn: Any, operands: Any, outputs: Any, loops: Any) -> Step:
        private = [isinstance(v, Private) for v in operands]
        if any(isinstance(v, Derived) and v.leaves for v in operands):
            found = _uses.find_rule(eqn, private, [self.is_part(v) for v in operands])
            others = [v for i, v in enumerate(operands) if not (found and i == found[1])]
            if (
                found
                and operands[found[1]].leaves
                and not any(isinstance(v, Derived) and v.leaves for v in others)
            ):
                rule, parameter, data = found
                around = tuple((n, s in operands[parameter].scans) for s, n in loops)
                use = Use(
                    self.uses, rule, operands[parameter], eqn.invars[data].aval,
                    eqn.outvars[0].aval, around, rule.reads_data and operands[data].touched,
                )  # fmt: skip
                self.uses += 1
                return Step(eqn, operands, outputs, use=use, data=data)
            steps = math.prod(length for _, length in loops)
            self.mark(operands, eqn.primitive.name, steps * eqn.outvars[0].aval.size)
        return Step(eqn, operands, outputs)

    def scan(self, eqn: Any, operands: Any, outputs: Any, loops: Any) -> Step:
        p = eqn.params
        scan, self.scans = self.scans, self.scans + 1
        n_consts, n_carry = p["num_consts"], p["num_carry"]
        inner, consts = _open(p["jaxpr"])
        args: list[Value] = []
        for i, (outer, var) in enumerate(zip(operands, inner.invars, strict=True)):
            if n_consts <= i < n_consts + n_carry:
                args.append(Private(var.aval))
            elif isinstance(outer, Private):
                args.append(Private(var.aval, outer.touched))
            elif i < n_consts:
                args.append(outer)
            else:
                scans = (*outer.scans, scan)
                args.append(
                    Derived(
                        var.aval,
                        outer.leaves,
                        outer.varies,
                        scans,
                        outer.view,
                        outer.tiles,
                        alias=outer,
                    )
                )
        self.mark(operands[n_consts : n_consts + n_carry], "the carry of scan")
        body = self.read(inner, [*map(_constant, consts)], args, (*loops, (scan, p["length"])))
        self.mark(body.results, "the results of scan")
        return Step(eqn, operands, outputs, body=body, scan=scan)


def _views_after(eqn: Any, operands: tuple[Derived, ...]) -> list[_views.View | None]:
    """The views that an operation's results are, None where they are none."""
    name = eqn.primitive.name
    unknown: list[_views.View | None] = [None] * len(eqn.outvars)
    moved = [v for v in operands if v.leaves]
    if len(moved) != 1 or moved[0].view is None:
        return unknown
    if moved[0] is not operands[0] and name != "mul":
        return unknown
    view, lead = moved[0].view, len(moved[0].scans)
    if name == "split":
        return view.split(eqn.params["axis"] + lead, eqn.params["sizes"])
    if len(eqn.outvars) != 1:
        return unknown
    constants = [v.constant for v in operands if v is not moved[0]]
    return [_views.through(view, name, _behind(view.shape[:lead], name, eqn.params), constants)]


def _tiles(eqn: Any, operands: tuple[Derived, ...]) -> Any:
    """What `Derived.tiles` is after a concatenation of whole parameters."""
    views = [v.view for v in operands if v.view is not None]
    alike = len({v.scans for v in operands}) == 1
    if eqn.primitive.name != "concatenate" or len(views) < len(operands) or not alike:
        return None
    return eqn.params["dimension"] + len(operands[0].scans), tuple(views)


def _behind(steps: tuple[int, ...], name: str, params: Any) -> dict[str, Any]:
    """The parameters of an operation on one step, for all steps of the scans around at once."""
    lead, params = len(steps), dict(params)
    front = tuple(range(lead))
    if name == "reshape":
        params["new_sizes"] = (*steps, *params["new_sizes"])
    elif name == "transpose":
        params["permutation"] = (*front, *(i + lead for i in params["permutation"]))
    elif name == "squeeze":
        params["dimensions"] = tuple(i + lead for i in params["dimensions"])
    elif name == "broadcast_in_dim":
        params["shape"] = (*steps, *params["shape"])
        kept = (i + lead for i in params["broadcast_dimensions"])
        params["broadcast_dimensions"] = (*front, *kept)
    elif name == "slice":
        starts = params["start_indices"]
        params["strides"] = (*(1 for _ in steps), *(params["strides"] or (1 for _ in starts)))
        params["start_indices"] = (*(0 for _ in steps), *starts)
        params["limit_indices"] = (*steps, *params["limit_indices"])
    return params


def _open(jaxpr: Any) -> tuple[Any, list[Any]]:
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _constant(value: Any) -> Derived:
    return Derived(jax.typeof(value), constant=value)


def read_program(loss_fn: Any, params: Any, example: Any, key: Any, *, has_aux: bool) -> Program:
    """Traces `loss_fn(params, example[, key])` on shapes and reads it.

    The arguments are arrays or shape structs of one example; `key` is None where there is none.
    """
    extra = () if key is None else (key,)

    def flat(params: Any, example: Any, *key: Any) -> Any:
        out = loss_fn(params, example, *key)
        return out if has_aux else (out, None)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(params, example, *extra)
    if shapes[0].shape != ():
        raise TypeError(
            f"loss_fn must return a scalar for one example, but its value has shape "
            f"{shapes[0].shape}; reduce it, or set has_aux=True if it returns (loss, aux)"
        )
    leaves = jax.tree.leaves(params)
    count = len(leaves)
    args: list[Value] = []
    for i, var in enumerate(closed.jaxpr.invars):
        if i < count:
            view = _views.View.whole(i, tuple(var.aval.shape))
            args.append(Derived(var.aval, frozenset({i}), True, view=view, leaf=i))
        else:
            args.append(Private(var.aval, touched=False))
    reader = _Reader([var.aval for var in closed.jaxpr.invars[:count]])
    block = reader.read(closed.jaxpr, [_constant(c) for c in closed.consts], args, ())
    reader.mark(block.results[:1], "the loss itself")
    uses = tuple(sorted(block.uses(), key=lambda use: use.index))
    return Program(
        block,
        tuple(var.aval for var in closed.jaxpr.invars[:count]),
        uses,
        {leaf: tuple(reasons) for leaf, reasons in reader.opaque.items()},
        frozenset(set(reader.opaque) - reader.heavy),
        jax.tree.structure(shapes),
    )
