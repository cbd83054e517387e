"""Registers state classes with `flax.serialization`."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

_registered: set[type] = set()


class SerializableState:
    """Base class of dataclasses of states that `flax.serialization` can store and restore.

    Only arrays are stored. Static fields come from the target, and `update` compares them with the
    stored arrays.
    """


def register() -> None:
    """Registers the state classes if flax is installed. Every `init` calls this.

    A program may import flax after it made a state, so `init` imports `flax.serialization`.
    """
    if importlib.util.find_spec("flax") is None:
        return
    serialization: Any = importlib.import_module("flax.serialization")
    for cls in set(_subclasses(SerializableState)) - _registered:
        serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)
        _registered.add(cls)


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _stored(x: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(x) if not f.metadata.get("static")]


def key_to_data(x: Any) -> Any:
    """Returns the data of a key, or any other value unchanged."""
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
            f"A stored {type(target).__name__} must have the fields {sorted(names)}, got "
            f"{sorted(stored)} from another version of dpoptax. Finish the run with the version "
            "that started it, or start a new run from its parameters with `tx.init` and account "
            "for both runs."
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
