"""Registers the state classes with `flax.serialization`, which asks for each class."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp

_unregistered: list[type] = []


def serializable(cls: type) -> type:
    """Lets `flax.serialization.to_bytes` and `from_bytes` take states of this dataclass.

    Arrays are stored. Static fields are not: they come from the target, and `update` compares them
    with what was stored. Importing flax here would cost a second, so the class is registered now
    only if flax is loaded already, and otherwise by the next call of `register`.
    """
    _unregistered.append(cls)
    register()
    return cls


def register() -> None:
    """Registers the state classes if flax is loaded; every `init` that makes a state calls this."""
    serialization: Any = sys.modules.get("flax.serialization")
    # While flax is being imported, its module is there and its functions are not.
    if not hasattr(serialization, "register_serialization_state"):
        return
    while _unregistered:
        cls = _unregistered.pop()
        serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)


def _stored(x: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(x) if not f.metadata.get("static")]


def key_to_data(x: Any) -> Any:
    """A key as its data, and all else as it is."""
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_state_dict(state: Any) -> dict[str, Any]:
    from flax import serialization

    return {
        name: serialization.to_state_dict(jax.tree.map(key_to_data, getattr(state, name)))
        for name in _stored(state)
    }


def _from_state_dict(target: Any, stored: dict[str, Any]) -> Any:
    from flax import serialization

    names = _stored(target)
    if set(stored) != set(names):
        raise ValueError(
            f"a stored {type(target).__name__} has {sorted(stored)}, this version's has "
            f"{sorted(names)}: finish the run with the version that began it, or start a new one "
            "from its parameters with tx.init and count both"
        )

    def restored(old: Any, new: Any) -> Any:
        if not _is_key(old):
            return new
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))

    changed = {}
    for name in names:
        old = getattr(target, name)
        data = jax.tree.map(key_to_data, old)
        new = serialization.from_state_dict(data, stored[name])
        changed[name] = jax.tree.map(restored, old, new)
    return dataclasses.replace(target, **changed)
