"""Whether a loss keeps examples apart when it is mapped over a batch.

What one example contributes must be a function of that example. `jax.vmap` of a loss is that for
all operations but a few, which make a batch of results in a way of their own. They may stand in the
loss, or in the derivative that the author of a `jax.custom_vjp` or a `jax.custom_jvp` gave, which
no program has before it is differentiated.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace.activity import CONSTANT, carries_gradient
from dpoptax._ghost_clipping.trace.derived_values import CUSTOM, bind, inside
from dpoptax._ghost_clipping.trace.program import type_of

# Operations whose inner program gets their operands, one for one.
CALLS = frozenset(
    {
        "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit",
        "pjit", "remat", "remat2",
    }
)  # fmt: skip
# Random bits of a batch of such keys are made of the first one alone, by place in the batch.
_BY_PLACE = ("key<rbg>", "key<urbg>")
_DRAWS = ("random_bits", "random_fold_in", "random_split")
# A function outside of the program that gets one example at a time.
_ONE_BY_ONE = ("sequential", "sequential_unrolled")
# Of a jax.Ref; where a whole loss has them, of one that was made before.
_OF_REFERENCES = ("ReadEffect", "WriteEffect", "AccumEffect")
# Operations as objects, whose rules for vmap and derivatives are in no program; JAX's own keep
# examples apart.
HIDDEN, _KNOWN = "call_hi_primitive", "jax._src.numpy."
_REST = (
    "what an example contributes would depend on the others in its batch, and no clip bounds how "
    "much one of them then moves the sum"
)


def check_separate(program: ClosedJaxpr, shared: int, derivatives: int = 1) -> None:
    """Raises a TypeError where a loss of one example, mapped over a batch, may mix examples.

    Args:
      program: the traced loss.
      shared: how many of its operands, the first, are the parameters: the same for all examples,
        and what it is differentiated by.
      derivatives: how often, one after the other.
    """
    private = [i >= shared for i in range(len(program.jaxpr.invars))]
    _check_program(program, private, [not own for own in private], derivatives)


def _check_program(
    program: ClosedJaxpr, private: Sequence[bool], active: Sequence[bool], derivatives: int
) -> None:
    if axes := sorted(named_axes(program.effects)):
        raise TypeError(
            f"loss_fn communicates over the axis {axes[0]!r} (psum, pmean, axis_index): {_REST}. "
            "Let it read its own example alone; statistics of a batch, as of batch normalisation, "
            "have no per-example gradient"
        )
    if touches_reference(program.effects):
        raise TypeError(
            f"loss_fn reads or writes a jax.Ref from outside of it: {_REST}. Return what is to be "
            "kept, with has_aux=True"
        )
    _check(program.jaxpr, private, active, derivatives)


def _check(
    program: Jaxpr, private: Sequence[bool], active: Sequence[bool], derivatives: int
) -> None:
    """`private` operands may be an example's own, `active` ones depend on the parameters."""
    owned: set[Var] = {v for v, own in zip(program.invars, private, strict=True) if own}
    flowing: set[Var] = {v for v, flows in zip(program.invars, active, strict=True) if flows}
    for eqn in program.eqns:
        name = eqn.primitive.name
        own = [not isinstance(v, Literal) and v in owned for v in eqn.invars]
        flows = [not isinstance(v, Literal) and v in flowing for v in eqn.invars]
        if any(own):
            _check_operation(eqn)
        if name == HIDDEN and any(own + flows):
            _check_hidden(eqn)
        if name in CUSTOM and any(flows):
            _check_derivative(eqn, own, flows, derivatives)
        for inner in inside(eqn.params):
            # The rule stands for what is inside, which nobody differentiates.
            through = [name not in CUSTOM and f for f in flows]
            called = name in CALLS and len(inner.invars) == len(own)
            flags = [(any(own), any(through))] * len(inner.invars)
            given = list(zip(own, through, strict=True)) if called else flags
            _check(inner, [o for o, _ in given], [f for _, f in given], derivatives)
        if any(own):
            owned.update(eqn.outvars)
        if any(flows) and name not in CONSTANT:
            flowing.update(v for v in eqn.outvars if carries_gradient(type_of(v)))


def _check_derivative(
    eqn: JaxprEqn, private: Sequence[bool], active: Sequence[bool], derivatives: int
) -> None:
    """Checks an operation's derivative; cotangents are private, whatever the operands are."""
    if not derivatives:
        return
    operands = [jax.ShapeDtypeStruct(type_of(v).shape, type_of(v).dtype) for v in eqn.invars]
    moved = [i for i, v in enumerate(eqn.invars) if active[i] and carries_gradient(type_of(v))]

    def outputs(*operands: jax.Array) -> list[jax.Array]:
        return [x for x in bind(eqn, operands) if carries_gradient(jax.typeof(x))]

    def pulled(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        def at(*chosen: jax.Array) -> list[jax.Array]:
            new = dict(zip(moved, chosen, strict=True))
            return outputs(*(new.get(i, x) for i, x in enumerate(operands)))

        return list(jax.vjp(at, *(operands[i] for i in moved))[1](cotangents))

    cotangents = jax.eval_shape(outputs, *operands)
    program = jax.make_jaxpr(pulled)(operands, cotangents)
    rest = [True] * len(cotangents)
    _check_program(program, [*private, *rest], [*active, *rest], derivatives - 1)


def named_axes(effects: Iterable[Any]) -> list[str]:
    """The axes over which an operation or a program communicates, by its effects."""
    return [str(e.name) for e in effects if type(e).__name__ == "NamedAxisEffect"]


def has_keys_by_place(eqn: JaxprEqn) -> bool:
    """Whether an operation gets keys of which a batch is used by the place in it."""
    return any(str(getattr(v.aval, "dtype", "")) in _BY_PLACE for v in eqn.invars)


def touches_reference(effects: Iterable[object]) -> bool:
    """Whether a `jax.Ref` is read or written, by the effects of an operation or a program."""
    return any(type(effect).__name__ in _OF_REFERENCES for effect in effects)


def _check_hidden(eqn: JaxprEqn) -> None:
    kind = type(eqn.params["_prim"])
    if not kind.__module__.startswith(_KNOWN):
        raise TypeError(
            f"loss_fn has an operation of jax.experimental.hijax, {kind.__name__}, whose rules for "
            f"vmap and derivatives are in no program and may mix examples: {_REST}. Write it with "
            "jax.custom_vjp, and leave the options jax_custom_vjp3 and jax_remat3 off"
        )


def runs_to_the_last(name: str) -> bool:
    """Whether a batch is iterated on until its last example has converged.

    Each turn more changes the last places of all: of `betainc` by terms that are not quite nothing,
    of XLA's eigenvalues by Jacobi, which TPUs have, by rotations that are not.
    """
    if name == "regularized_incomplete_beta":
        return jax.__version_info__ < (0, 12)
    return name in ("eigh", "svd") and jax.default_backend() == "tpu"


def _check_operation(eqn: JaxprEqn) -> None:
    """Raises for an operation on private operands that `jax.vmap` does not map one by one."""
    name = eqn.primitive.name
    if name == "rng_bit_generator" or (name in _DRAWS and has_keys_by_place(eqn)):
        raise TypeError(
            "loss_fn draws random numbers by the generator 'rbg', which under jax.vmap takes them "
            f"from the first example's key, by place in the batch: {_REST}. Give keys of "
            "jax.random.key(seed, impl='threefry2x32'), or of dpoptax.random_key_from_os()"
        )
    if runs_to_the_last(name):
        raise TypeError(
            f"loss_fn computes {name}, which this version of JAX on this platform does for all "
            f"examples together, until the last has converged: {_REST}. Write it with a "
            "jax.lax.while_loop, which jax.vmap ends for each example by itself, or take JAX 0.12 "
            "for betainc, and other platforms than TPU for eigenvalues and singular values"
        )
    if name == "custom_vmap_call":
        raise TypeError(
            f"loss_fn has an operation with a vmap rule of its own (jax.custom_batching): {_REST}. "
            "Write it without, or take the gradients of single examples by a loop and give them to "
            "dpoptax.extend.clip_per_example"
        )
    outside = "callback" in name or "vmap_method" in eqn.params
    if outside and eqn.outvars and eqn.params.get("vmap_method") not in _ONE_BY_ONE:
        raise TypeError(
            f"loss_fn calls a function outside of the program, by {name}, with a whole batch: "
            f"{_REST}. Give jax.pure_callback vmap_method='sequential'"
        )
