"""Whether a loss keeps examples apart when it is mapped over a batch.

What one example contributes must be a function of that example. `jax.vmap` of a loss is that for
all operations but a few, which make a batch of results in a way of their own.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._bookkeeping.deriving import inside

# Operations whose inner program gets their operands, one for one.
_CALLS = frozenset(
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
_REST = (
    "what an example contributes would depend on the others in its batch, and no clip bounds how "
    "much one of them then moves the sum"
)


def check_separate(program: ClosedJaxpr, shared: int) -> None:
    """Raises a TypeError where a loss of one example, mapped over a batch, may mix examples.

    Args:
      program: the traced loss.
      shared: how many of its operands, the first, are the same for all examples.
    """
    axes = sorted(str(e.name) for e in program.effects if type(e).__name__ == "NamedAxisEffect")
    if axes:
        raise TypeError(
            f"loss_fn communicates over the axis {axes[0]!r} (psum, pmean, axis_index): {_REST}. "
            "Let it read its own example alone; statistics of a batch, as of batch normalisation, "
            "have no per-example gradient"
        )
    _check(program.jaxpr, [i >= shared for i in range(len(program.jaxpr.invars))])


def _check(program: Jaxpr, private: Sequence[bool]) -> None:
    known: set[Var] = {v for v, own in zip(program.invars, private, strict=True) if own}
    for eqn in program.eqns:
        flags = [not isinstance(v, Literal) and v in known for v in eqn.invars]
        if not any(flags):
            continue
        _check_operation(eqn)
        for inner in inside(eqn.params):
            called = eqn.primitive.name in _CALLS and len(inner.invars) == len(flags)
            _check(inner, flags if called else [True] * len(inner.invars))
        known.update(eqn.outvars)


def _check_operation(eqn: JaxprEqn) -> None:
    """Raises for an operation on private operands that `jax.vmap` does not map one by one."""
    name = eqn.primitive.name
    dtypes = [str(v.aval.dtype) for v in eqn.invars if hasattr(v.aval, "dtype")]
    if name == "rng_bit_generator" or (name in _DRAWS and set(dtypes) & set(_BY_PLACE)):
        raise TypeError(
            "loss_fn draws random numbers by the generator 'rbg', which under jax.vmap takes them "
            f"from the first example's key, by place in the batch: {_REST}. Give keys of "
            "jax.random.key(seed, impl='threefry2x32'), or of dpoptax.random_key_from_os()"
        )
    if name == "custom_vmap_call":
        raise TypeError(
            f"loss_fn has an operation with a vmap rule of its own (jax.custom_batching): {_REST}. "
            "Write it without, or take the gradients of single examples by a loop and give them to "
            "dpoptax.clip_per_example"
        )
    outside = "callback" in name or "vmap_method" in eqn.params
    if outside and eqn.outvars and eqn.params.get("vmap_method") not in _ONE_BY_ONE:
        raise TypeError(
            f"loss_fn calls a function outside of the program, by {name}, with a whole batch: "
            f"{_REST}. Give jax.pure_callback vmap_method='sequential'"
        )
