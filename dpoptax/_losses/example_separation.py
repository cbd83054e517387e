"""Checks that a loss keeps examples separate when it is mapped over a batch.

The contribution of an example must depend on that example only. `jax.vmap` guarantees this for all
operations except a few, which define their own batching. These may appear in the loss, or in the
derivative of a `jax.custom_vjp` or `jax.custom_jvp`. A program shows such a derivative only after
differentiation, so the check differentiates it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._support.jaxprs import (
    CUSTOM_DERIVATIVE_CALLS,
    HIJAX_CALL,
    JOINT_ON_TPU,
    JOINT_REDUCTIONS,
    PROGRAM_CALLS,
    RANDOM_PRIMITIVES,
    ZERO_DERIVATIVE_PRIMITIVES,
    bind,
    carries_gradient,
    subprograms,
    type_of,
)

# For a batch of such keys, JAX draws bits from the first key, by position in the batch.
_POSITIONAL_KEYS = ("key<rbg>", "key<urbg>")
# With these methods, a host function is called with one example at a time.
_SEQUENTIAL_METHODS = ("sequential", "sequential_unrolled")
# Effects of a `jax.Ref`. If a whole loss has them, the reference was created outside.
_REFERENCE_EFFECTS = ("ReadEffect", "WriteEffect", "AccumEffect")
# `HIJAX_CALL` operations from these modules are part of JAX and keep examples separate.
_JAX_MODULE = "jax._src.numpy."
_CONSEQUENCE = (
    "The contribution of an example would depend on the rest of its batch, and clipping would not "
    "bound how much one example moves the sum."
)


# Whether each operand has a property.
_Flags: TypeAlias = Sequence[bool]


def check_separate(program: ClosedJaxpr, shared: int) -> None:
    """Raises a TypeError if a loss that is mapped over a batch may mix examples.

    Args:
      program: the traced loss.
      shared: the number of leading operands that are parameters. They are the same for all
        examples, and the loss is differentiated once with respect to them.
    """
    private = [i >= shared for i in range(len(program.jaxpr.invars))]
    _check_program(program, private, [not is_private for is_private in private])


def _check_program(program: ClosedJaxpr, private: _Flags, active: _Flags) -> None:
    if axes := sorted(named_axes(program.effects)):
        raise TypeError(
            f"`loss_fn` must not communicate over the axis {axes[0]!r} (psum, pmean, axis_index). "
            f"{_CONSEQUENCE} Statistics of a batch, as in batch normalization, have no per-example "
            "gradient."
        )
    if touches_reference(program.effects):
        raise TypeError(
            f"`loss_fn` must not read or write a `jax.Ref` from outside. {_CONSEQUENCE} Return the "
            "values to keep, with has_aux=True."
        )
    _check_jaxpr(program.jaxpr, private, active)


def _check_jaxpr(program: Jaxpr, private: _Flags, active: _Flags) -> None:
    """Checks a program whose `private` operands depend on the example.

    It is differentiated with respect to its `active` operands.
    """
    private_vars: set[Var] = {
        v for v, private_in in zip(program.invars, private, strict=True) if private_in
    }
    active_vars: set[Var] = {
        v for v, active_in in zip(program.invars, active, strict=True) if active_in
    }
    for eqn in program.eqns:
        name = eqn.primitive.name
        private_in = [not isinstance(v, Literal) and v in private_vars for v in eqn.invars]
        active_in = [not isinstance(v, Literal) and v in active_vars for v in eqn.invars]
        if any(private_in):
            # An operation on parameters only is not mapped over examples, so its vmap rule is not
            # used.
            _check_operation(eqn, program)
        if name == HIJAX_CALL and any(private_in + active_in):
            _check_hijax(eqn)
        if name in CUSTOM_DERIVATIVE_CALLS and any(active_in):
            _check_derivative(eqn, private_in, active_in)
        for inner in subprograms(eqn.params):
            # The custom rule replaces the derivative of the inner program.
            through = [name not in CUSTOM_DERIVATIVE_CALLS and f for f in active_in]
            # In other inner programs, any operand may reach any input.
            called = name in PROGRAM_CALLS and len(inner.invars) == len(private_in)
            flags = [(any(private_in), any(through))] * len(inner.invars)
            given = list(zip(private_in, through, strict=True)) if called else flags
            _check_jaxpr(inner, [o for o, _ in given], [f for _, f in given])
        if any(private_in):
            private_vars.update(eqn.outvars)
        if any(active_in) and name not in ZERO_DERIVATIVE_PRIMITIVES:
            active_vars.update(v for v in eqn.outvars if carries_gradient(type_of(v)))


def _check_derivative(eqn: JaxprEqn, private: _Flags, active: _Flags) -> None:
    """Checks the derivative of an operation. Cotangents are always private."""
    operands = [jax.ShapeDtypeStruct(type_of(v).shape, type_of(v).dtype) for v in eqn.invars]
    moved = [i for i, v in enumerate(eqn.invars) if active[i] and carries_gradient(type_of(v))]

    def outputs(*operands: jax.Array) -> list[jax.Array]:
        return [x for x in bind(eqn, operands) if carries_gradient(jax.typeof(x))]

    def pulled(operands: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
        def at(*chosen: jax.Array) -> list[jax.Array]:
            new = dict(zip(moved, chosen, strict=True))
            return outputs(*(new.get(i, x) for i, x in enumerate(operands)))

        return list(jax.vjp(at, *(operands[i] for i in moved))[1](cotangents))

    # Tracing the derivative shows the operations of the user's rule, which the loss only names.
    cotangents = jax.eval_shape(outputs, *operands)
    program = jax.make_jaxpr(pulled)(operands, cotangents)
    flags = [*private, *(True for _ in cotangents)]
    # The derivative is not differentiated again.
    _check_program(program, flags, [False] * len(flags))


def named_axes(effects: Iterable[Any]) -> list[str]:
    """Returns the mesh axes over which an operation or program communicates."""
    return [str(e.name) for e in effects if type(e).__name__ == "NamedAxisEffect"]


def has_positional_keys(eqn: JaxprEqn) -> bool:
    """Returns whether an operation gets keys that depend on positions in a batch."""
    return any(str(getattr(v.aval, "dtype", "")) in _POSITIONAL_KEYS for v in eqn.invars)


def touches_reference(effects: Iterable[object]) -> bool:
    """Returns whether the effects of a program read or write a `jax.Ref`."""
    return any(type(effect).__name__ in _REFERENCE_EFFECTS for effect in effects)


def _check_hijax(eqn: JaxprEqn) -> None:
    kind = type(eqn.params["_prim"])
    if not kind.__module__.startswith(_JAX_MODULE):
        raise TypeError(
            "`loss_fn` must not contain an operation of jax.experimental.hijax, got "
            f"{kind.__name__}, whose rules for vmap and derivatives may mix examples. "
            f"{_CONSEQUENCE} Write it with `jax.custom_vjp`, and leave the options jax_custom_vjp3 "
            "and jax_remat3 off."
        )


def converges_jointly(name: str) -> bool:
    """Returns whether a batch is iterated until its last example has converged.

    Each additional iteration changes the last digits of all examples, by small terms for `betainc`
    and by rotations for XLA's Jacobi eigenvalues on TPU.
    """
    if name == "regularized_incomplete_beta":
        return jax.__version_info__ < (0, 12)
    return name in JOINT_ON_TPU and jax.default_backend() == "tpu"


def _check_operation(eqn: JaxprEqn, program: Jaxpr) -> None:
    """Raises an error if `jax.vmap` does not map an operation example by example."""
    name = eqn.primitive.name
    if name in JOINT_REDUCTIONS:
        _check_condition(eqn.outvars[0], program)
    if name == "rng_bit_generator" or (name in RANDOM_PRIMITIVES and has_positional_keys(eqn)):
        raise TypeError(
            "`loss_fn` must not draw random numbers with the generator 'rbg'. Under `jax.vmap` it "
            f"uses the key of the first example and the position in the batch. {_CONSEQUENCE} Pass "
            "a key from `jax.random.key(seed, impl='threefry2x32')` or "
            "`dpoptax.random_key_from_os()`."
        )
    if converges_jointly(name):
        raise TypeError(
            f"`loss_fn` must not compute {name}, which this version of JAX on this platform "
            f"iterates for all examples until the last one has converged. {_CONSEQUENCE} Write it "
            "with a `jax.lax.while_loop`, which `jax.vmap` ends for each example separately. "
            "JAX 0.12 supports betainc, and platforms other than TPU support eigenvalues and "
            "singular values."
        )
    if name == "custom_vmap_call":
        raise TypeError(
            "`loss_fn` must not contain an operation with its own vmap rule (jax.custom_batching), "
            "since a rule is not part of the trace and may combine the examples of a batch. If it "
            "keeps them separate, as that of `sequential_vmap` does, call the function without it. "
            "Otherwise, compute per-example gradients in a loop and pass them to "
            "`dpoptax.extend.clip_per_example`."
        )
    outside = "callback" in name or "vmap_method" in eqn.params
    if outside and eqn.outvars and eqn.params.get("vmap_method") not in _SEQUENTIAL_METHODS:
        raise TypeError(
            f"`loss_fn` must not call a host function with a whole batch, got {name}. "
            f"{_CONSEQUENCE} Call `jax.pure_callback` with vmap_method='sequential'."
        )


def _check_condition(joint: Var, program: Jaxpr) -> None:
    """Raises an error if `equinox.error_if` reads a condition of a whole batch.

    An error would be an output without noise. With "nan", one example makes all others NaN. With
    "off", the condition is not read.
    """
    # `error_if` passes the joint condition to a `custom_jvp_call`. The program inside reads it only
    # if an error is possible.
    checks = [eqn for eqn in program.eqns if eqn.primitive.name == "custom_jvp_call"]
    pairs = [
        (v, w, eqn.params["call_jaxpr"].jaxpr)
        for eqn in checks
        for v, w in zip(eqn.invars, eqn.params["call_jaxpr"].jaxpr.invars, strict=True)
    ]
    if any(v is joint and any(w in e.invars for e in inner.eqns) for v, w, inner in pairs):
        raise TypeError(
            "`loss_fn` must not raise an error if an example is invalid (equinox.error_if, and "
            "solvers of diffrax, optimistix and lineax). The error would reveal the example, and "
            "with EQX_ON_ERROR=nan one example makes the gradients of its whole batch NaN. Pass "
            "`throw=False` to the solver, or set the environment variable EQX_ON_ERROR=off before "
            "Python starts. To leave out an example that fails, return "
            "`jnp.where(valid, loss, 0.0)`."
        )
