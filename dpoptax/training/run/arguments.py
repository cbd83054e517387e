"""Checks the arguments of `dpoptax.training.fit` and moves arrays to devices."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.runs import check_rows
from dpoptax.training import hosts
from dpoptax.training.data import streaming
from dpoptax.training.task import PlainPlan
from dpoptax.users import UserTable


def check_types(
    plan: "dpoptax.PrivacyPlan | PlainPlan", optimizer: optax.GradientTransformation
) -> None:
    """Raises if the plan or the optimizer has another type."""
    if not isinstance(plan, dpoptax.PrivacyPlan | PlainPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`optimizer` must be an optax transformation, got {optimizer!r}. Pass "
            "`optax.MultiSteps(…).gradient_transformation()` for MultiSteps."
        )


def check_unused(**arguments: Any) -> None:
    """Raises if an argument is given that `grad_fn` replaces."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must not be given with `grad_fn`, got {value!r}. Pass it to "
                "`dpoptax.clipped_grad`, which makes `grad_fn`."
            )


def check_plain(noiseless: bool, loss_fn: Any, grad_fn: Any, budget: float | None) -> None:
    """Raises if an argument needs the noise or the price that a `PlainPlan` lacks."""
    inputs = {"budget": budget, "grad_fn": grad_fn if noiseless else None}
    for name, value in inputs.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None under a `PlainPlan`, got {value!r}.")
    if noiseless and len(required("loss_fn", loss_fn)) > 2:
        raise ValueError(
            "`loss_fn` must not take a key for training without privacy. Remove the key, or use a "
            "`PrivacyPlan`."
        )


def check_automatic(mesh: Mesh | None) -> None:
    """Raises if a mesh has explicit axes, which a given gradient and the step would not share."""
    if mesh is not None and set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"`mesh` must have automatic axes with `grad_fn`, got {mesh}. Make it by "
            "`jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,))`."
        )


def automatic(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh with automatic axes.

    Raises:
        ValueError: The mesh has no axis "data".
    """
    if mesh is None:
        return None
    names = mesh.axis_names
    if "data" not in names:
        raise ValueError(f"`mesh` must have an axis 'data' for the examples, got the axes {names}.")
    return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))


def on_devices(name: str, tree: Any, mesh: Mesh | None) -> Any:
    """Copies arrays to the devices, sharded or replicated, for a step that donates them.

    Raises:
        TypeError: A leaf is not an array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise TypeError(
                f"`{name}` must be a tree of arrays, got a {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Split arrays from everything else, "
                "such as with eqx.partition or nnx.split."
            )
    return copied(_distribute(jax.tree.map(_strongly_typed, tree), mesh))


def _distribute(tree: Any, mesh: Mesh | None) -> Any:
    """Places arrays, which must be equal on all hosts, on every device.

    Arrays that are sharded over the mesh stay sharded. All others are replicated.
    """
    if mesh is None:
        return jax.device_put(tree)

    def sharding(x: Any) -> NamedSharding:
        given = x.sharding if isinstance(x, jax.Array) else None
        if (
            isinstance(given, NamedSharding)
            and given.mesh.axis_names == mesh.axis_names
            and np.array_equal(given.mesh.devices, mesh.devices)
        ):
            return NamedSharding(mesh, given.spec)
        return NamedSharding(mesh, P())

    return jax.tree.map(lambda x: hosts.place(x, sharding(x)), tree)


def _strongly_typed(x: Any) -> jax.Array:
    # Zeros like a weakly typed array lose its sharding.
    x = jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def shapes_of(tree: Any) -> Any:
    """Returns shapes, types and shardings of arrays on the devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def param_specs(params: Any) -> Any:
    """Returns the `PartitionSpec` of each parameter, or None if all are replicated."""
    placed = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
    if all(sharding is None or sharding.is_fully_replicated for sharding in placed):
        return None
    return jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", P()), params)


@jax.jit
def copied(tree: Any) -> Any:
    """Returns copies of arrays."""
    return jax.tree.map(jnp.copy, tree)


def checked_data(
    data: streaming.Source,
    plan: "dpoptax.PrivacyPlan | PlainPlan",
    users: UserTable | None,
    mesh: Mesh | None,
) -> streaming.Source:
    """Checks the data and moves them to the host if several devices share a batch.

    Raises:
        TypeError: A column has no length, or no records at integer indices.
        ValueError: The data do not fit the plan, or are not finite.
    """
    columns = streaming.columns(data)
    if any(isinstance(column, jax.ShapeDtypeStruct) for column in columns):
        raise ValueError(
            "`data` must hold the examples to train on them, got their shapes, which only plan a "
            "run. Pass the data, such as by --data-dir."
        )
    check_rows(data, plan.sampler, users, sources=True)
    found, checked = streaming.count_not_finite(data)
    if found:
        raise ValueError(
            f"`data` must be finite in float32, got NaN, infinity or a larger number in {found} of "
            f"{checked} examples. Remove these examples, whose gradients would count as zero."
        )
    if mesh is None:
        return data
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, data)


_FUNCTIONS = {
    "loss_fn": "the loss of one example",
    "evaluate": "a function of the parameters",
    "grad_fn": "a function from `dpoptax.clipped_grad`",
}


def required(name: str, function: Any) -> list[str]:
    """Returns the names of the required arguments of a function, except `frozen`.

    A third one of `loss_fn` is a key, and a second one of `evaluate` the state of the optimizer.

    Raises:
        TypeError: It is not a function.
    """
    if not callable(function):
        raise TypeError(f"`{name}` must be {_FUNCTIONS[name]}, got {function!r}.")
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name != "frozen"
    ]
