"""Counts matrix-unit passes, memory traffic and collectives in TPU HLO.

XLA's own cost analysis counts the body of a loop once. Here every computation is counted as often
as it runs.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Operations that move nothing, or whose bytes another instruction has: the bodies of loops and the
# first halves of asynchronous pairs.
_FREE = {
    "parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "while", "call",
    "conditional", "domain", "after-all", "add-dependency", "opt-barrier", "partition-id",
    "replica-id", "async-start", "async-update",
}  # fmt: skip
_ALLOCATIONS = re.compile('custom_call_target="(AllocateBuffer|ConcatBitcast)"')
_SLICES = ("dynamic-slice", "slice", "gather")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"^ +(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<operation>[a-z][\w-]*)\("
)
_OPERANDS = re.compile(r"%([\w.-]+)")


class Array(NamedTuple):
    """An array of a compiled program."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> int:
        """Returns its size without padding."""
        bits = re.search(r"\d+", self.dtype)  # "pred" has no number and takes a byte
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8

    @property
    def hbm_bytes(self) -> int:
        """Returns its size in main memory: 0 if it lies in the chip's vector memory."""
        return 0 if re.search(r"S\([1-9]\)", self.layout) else self.bytes


class Instruction(NamedTuple):
    """An instruction: results, operands, and the text after the parenthesis."""

    name: str
    operation: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    root: bool

    @property
    def bytes(self) -> int:
        """Returns the size of all results."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Returns the size of the results in main memory."""
        return sum(array.hbm_bytes for array in self.arrays)

    def computation(self, role: str) -> str:
        """Returns the name of the computation it calls as "calls", "body" or "condition"."""
        found = re.search(rf"\b{role}=%?([\w.-]+)", self.text)
        return found[1] if found else ""

    def numbers(self, attribute: str) -> list[int]:
        """Returns the numbers of an attribute such as `lhs_contracting_dims={1}`."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.text)
        return [int(n) for n in found[1].split(",") if n] if found else []


Computation: TypeAlias = dict[str, Instruction]


class Cost(NamedTuple):
    """The cost of a program on one chip.

    Attributes:
      passes: floating-point operations of contractions, times the passes of the matrix unit.
      hbm_bytes: bytes read from and written to main memory.
      kernels: instructions that run as a kernel or a library call, as often as they run.
      collectives: number and bytes of each kind; a kind ends in "*" within loops.
    """

    passes: float
    hbm_bytes: float
    kernels: int
    collectives: dict[str, tuple[int, float]]


def cost(text: str) -> Cost:
    """Returns the cost of an optimized program, `compiled.as_text()`."""
    program = HloProgram(text)
    passes, moved, kernels = 0.0, 0.0, 0
    collectives: dict[str, tuple[int, float]] = {}
    for name, runs in program.runs.items():
        for x in program.computations[name].values():
            moved += runs * program.moved(name, x)
            kernels += runs * _is_kernel(x)
            passes += runs * program.passes(name, x)
            kind = x.operation.removesuffix("-start")
            if kind in COLLECTIVES:
                key = kind + "*" * (runs > 1)
                number, size = collectives.get(key, (0, 0.0))
                sizes = [program.operand_bytes(name, x), *([x.bytes] * (kind == x.operation))]
                collectives[key] = number + runs, size + runs * max(sizes)
    return Cost(passes, moved, kernels, collectives)


def _is_kernel(x: Instruction) -> bool:
    return not (
        x.operation in _FREE or x.operation.endswith("-done") or _ALLOCATIONS.search(x.text)
    )


class HloProgram:
    """A compiled program: the instructions of each computation, and how often it runs."""

    def __init__(self, text: str):
        self.computations, entry = _read(text)
        self.runs: collections.Counter[str] = collections.Counter()
        self._count(entry, 1)

    def _count(self, name: str, runs: int) -> None:
        self.runs[name] += runs
        for x in self.computations[name].values():
            if x.operation == "while":
                self._count(x.computation("body"), runs * self._trips(x))
            elif x.operation == "call":
                self._count(x.computation("to_apply"), runs)
            elif x.operation == "async-start" and x.computation("calls") in self.computations:
                self._count(x.computation("calls"), runs)
            elif x.operation == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", x.text)
                for branch in _OPERANDS.findall(branches[1]) if branches else ():
                    self._count(branch, runs)

    def _trips(self, loop: Instruction) -> int:
        """Returns the iterations of a loop, from XLA or from its constant bound.

        The loop of `materialize` has neither, and no iterations.
        """
        known = re.search(r"known_trip_count\D*(\d+)", loop.text)
        if known:
            return int(known[1])
        condition = self.computations[loop.computation("condition")].values()
        constants = [re.match(r"(\d+)\)", x.text) for x in condition if x.operation == "constant"]
        return max((int(match[1]) for match in constants if match), default=0)

    def operand_bytes(self, name: str, x: Instruction) -> int:
        """Returns the size of all operands."""
        return sum(operand.bytes for operand in self._operands(name, x))

    def _operands(self, name: str, x: Instruction) -> list[Instruction]:
        block = self.computations[name]
        return [block[operand] for operand in x.operands if operand in block]

    def moved(self, name: str, x: Instruction) -> int:
        """Returns the bytes of main memory that an instruction reads and writes.

        A slice reads the size of its result, an update in place writes the size of the update, also
        within a fusion.
        """
        operation = x.operation
        if not _is_kernel(x):
            return 0
        operands = self._operands(name, x)
        if operation in _SLICES:
            return x.hbm_bytes + (x.bytes if operands[0].hbm_bytes else 0)
        if operation == "dynamic-update-slice":
            return operands[1].bytes + operands[1].hbm_bytes if x.hbm_bytes else 0
        if operation in ("slice-start", "copy-start"):  # results: destination, source, semaphore
            size = min(array.bytes for array in x.arrays[:2])
            return sum(size for array in x.arrays[:2] if array.hbm_bytes)
        if operation.endswith("-start"):
            return 2 * sum(operand.hbm_bytes for operand in operands)
        if operation != "fusion":
            return x.hbm_bytes + sum(operand.hbm_bytes for operand in operands)
        called = x.computation("calls")
        written = [size for result in self._results(called) for size in result]
        if len(written) == len(x.arrays):
            total = sum(n for n, array in zip(written, x.arrays, strict=True) if array.hbm_bytes)
        else:
            total = x.hbm_bytes
        for i, operand in enumerate(operands):
            if operand.hbm_bytes:
                total += self._read_by_fusion(called, i, operand.bytes)
        return total

    def _results(self, name: str) -> Iterator[list[int]]:
        """Yields the bytes that each result of a fusion writes."""
        block = self.computations[name]
        root = next(x for x in block.values() if x.root)
        for x in self._operands(name, root) if root.operation == "tuple" else [root]:
            while x.operation == "bitcast":
                x = block[x.operands[0]]
            if x.operation == "dynamic-update-slice":
                yield [block[x.operands[1]].bytes]
            elif x.operation == "fusion":
                yield [size for part in self._results(x.computation("calls")) for size in part]
            else:
                yield [array.bytes for array in x.arrays]

    def _read_by_fusion(self, name: str, operand: int, whole: int) -> int:
        """Returns the bytes that a fusion reads of an operand of `whole` bytes."""
        for x in self.computations[name].values():
            if x.operation == "parameter" and x.text.startswith(f"{operand})"):
                return min(whole, self._read(name, x.name, whole))
        return whole

    def _read(self, name: str, value: str, whole: int) -> int:
        total = 0
        for x in self.computations[name].values():
            places = [i for i, operand in enumerate(x.operands) if operand == value]
            if not places:
                continue
            if x.operation == "bitcast":
                total += self._read(name, x.name, whole)
            elif x.operation in _SLICES and places == [0]:
                total += x.bytes
            elif x.operation == "fusion":
                called = x.computation("calls")
                total += sum(self._read_by_fusion(called, i, whole) for i in places)
            elif x.operation != "dynamic-update-slice" or places != [0]:
                return whole
        return total

    def passes(self, name: str, x: Instruction) -> float:
        """Returns 2 × multiply-adds × passes of an instruction and the fusions in it."""
        if x.operation == "fusion":
            called = x.computation("calls")
            return sum(self.passes(called, y) for y in self.computations[called].values())
        operands = self._operands(name, x)
        if x.operation == "convolution":
            products = _convolution(x, operands[0].arrays[0].shape, operands[1].arrays[0].shape)
        elif x.operation == "dot":
            shape = operands[0].arrays[0].shape
            contracted = math.prod(shape[i] for i in x.numbers("lhs_contracting_dims"))
            products = math.prod(x.arrays[0].shape) * contracted
        else:
            return 0.0
        weight = 1
        if any(operand.arrays[0].dtype == "f32" for operand in operands):
            precision = re.search(r"operand_precision=\{([^}]*)\}", x.text)
            names = precision[1].split(",") if precision else []
            weight = 6 if "highest" in names else 3 if "high" in names else 1
        return 2.0 * products * weight


def _read(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, block = "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            block = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif block is not None and (found := _INSTRUCTION.match(line)):
            rest = line[found.end() :]
            operands = _OPERANDS.findall(rest[: _closing(rest)])
            arrays = tuple(
                Array(dtype, tuple(map(int, filter(None, sizes.split(",")))), layout)
                for dtype, sizes, layout in _ARRAY.findall(found["type"])
            )
            block[found["name"]] = Instruction(
                found["name"],
                found["operation"],
                arrays,
                tuple(operands),
                rest,
                bool(found["root"]),
            )
    return computations, entry


def _closing(text: str) -> int:
    """Returns the place of the parenthesis that closes the operands."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(text)


def _convolution(x: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
    """Returns the multiply-adds of a convolution without padding and dilation."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.text)
    assert labels is not None
    at_lhs, at_rhs, at_out = labels.groups()
    window = re.search(r"window=\{([^}]*)\}", x.text)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    out, axes = x.arrays[0].shape, sorted(filter(str.isdigit, at_out))

    def sizes(field: str, default: str) -> list[str]:
        return fields[field].split("x") if field in fields else [default] * len(axes)

    geometry = zip(
        axes, sizes("stride", "1"), sizes("pad", "0_0"), sizes("lhs_dilate", "1"),
        sizes("rhs_dilate", "1"), strict=True,
    )  # fmt: skip
    products = out[at_out.index("b")] * out[at_out.index("f")] * rhs[at_rhs.index("i")]
    for axis, stride, pad, lhs_dilation, rhs_dilation in geometry:
        products *= window_products(
            lhs[at_lhs.index(axis)], rhs[at_rhs.index(axis)], out[at_out.index(axis)],
            int(stride), int(pad.split("_")[0]), int(lhs_dilation), int(rhs_dilation),
        )  # fmt: skip
    return products


@functools.cache
def window_products(
    lhs: int, rhs: int, out: int, stride: int, pad: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Returns the products of entries along one axis of a convolution."""
    places = np.arange(out)[:, None] * stride - pad + np.arange(rhs) * rhs_dilation
    inside = (places >= 0) & (places <= (lhs - 1) * lhs_dilation) & (places % lhs_dilation == 0)
    return int(inside.sum())
