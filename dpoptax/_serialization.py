"""States in flax's serialization, which asks for a registration of each class."""

import dataclasses
import importlib.abc
import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp

_CLASSES: list[type] = []
_MODULE = "flax.serialization"


def serializable(cls: type) -> type:
    """Lets `flax.serialization.to_bytes` and `from_bytes` take states of this dataclass.

    Arrays are stored and statics are not: they are those of the target, and `update` compares what
    was stored with them. Flax is registered with now, or when it is imported: to import it here
    would cost who does not use it a second.
    """
    _CLASSES.append(cls)
    register()
    return cls


def register() -> None:
    """Registers the classes that flax, if it is loaded, does not know yet."""
    serialization: Any = sys.modules.get(_MODULE)
    if not hasattr(serialization, "register_serialization_state"):
        return
    while _CLASSES:
        serialization.register_serialization_state(_CLASSES.pop(), _to_state_dict, _from_state_dict)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers when flax's module has been executed: a state may be made before flax is there."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, whose loader registers afterwards; None for any other module."""
        if fullname != _MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # so that the search below is the others'
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            register()

        loader.exec_module = execute_and_register
        return spec


if _MODULE not in sys.modules:
    sys.meta_path.insert(0, _WhenImported())


def _stored(x: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(x) if not f.metadata.get("static")]


def as_data(x: Any) -> Any:
    """A key as its data, and all else as it is."""
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_state_dict(state: Any) -> dict[str, Any]:
    from flax import serialization

    return {
        name: serialization.to_state_dict(jax.tree.map(as_data, getattr(state, name)))
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
        data = jax.tree.map(as_data, old)
        new = serialization.from_state_dict(data, stored[name])
        changed[name] = jax.tree.map(restored, old, new)
    return dataclasses.replace(target, **changed)
