"""One compiled training step, shared by all seeds and learning rates of a config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.training.data.augmentations import step_key
from dpoptax.training.models import example_loss
from dpoptax.training.run.chain import TrainingChain
from dpoptax.users import per_user_loss

Step = Callable[..., tuple[Any, Any]]
"""`step(state, batch, mask, frozen) -> state`; a state is `(params, opt_state)`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Resident:
    """A batch as rows of a split that is on the device already.

    Attributes:
        split: Leaves (N, ...).
        rows: (B,), int32; of users (B, R).
        indices: (B,), int32: which record of the split each example is, or which user.
        rows_mask: Of users, which of their rows there are, (B, R); else None.
    """

    split: Any
    rows: Any
    indices: Any
    rows_mask: Any = None

    def examples(self) -> Any:
        """Leaves (B, ...); of users (B, R, ...), and the mask of records."""
        found = jax.tree.map(lambda values: values[self.rows], self.split)
        return found if self.rows_mask is None else (found, self.rows_mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loaded:
    """A batch that was read for the step.

    Attributes:
        batch: Leaves (B, ...); of users, leaves (B, R, ...) and the mask of records, (B, R).
        indices: (B,), int32: which record of the split each example is, or which user.
    """

    batch: Any
    indices: Any

    def examples(self) -> Any:
        """The examples that were read."""
        return self.batch


def compile_step(
    chain: TrainingChain,
    model: nn.Module,
    example_args: tuple[Any, ...],
    mesh: jax.sharding.Mesh | None = None,
) -> Step:
    """Compiles the training step of a run.

    `batch` is a `Resident` or a `Loaded`; `frozen` holds the variables of the model that are not
    trained. The arrays of the state are donated. Key and learning rate are in `opt_state`, so runs
    that differ only in seed and learning rate get the same executable.

    Args:
        chain: The resolved run.
        model: Maps one example's inputs to logits.
        example_args: Arguments of the step; only their shapes and types are used.
        mesh: Devices along an axis "data" that share the examples; None: one device.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *args: args, *example_args))
    return _compile(chain, model, tuple(leaves), structure, mesh)


@functools.lru_cache(maxsize=64)
def _compile(
    chain: TrainingChain,
    model: nn.Module,
    leaves: Any,
    structure: Any,
    mesh: jax.sharding.Mesh | None,
) -> Step:
    args = jax.tree.unflatten(structure, leaves)
    return lower_step(build_step(chain, model, mesh), args, mesh).compile()


def lower_step(
    unpacked: Callable[..., tuple[Any, Any]], args: Any, mesh: jax.sharding.Mesh | None
) -> jax.stages.Lowered:
    """Lowers a `Step` from `unpacked(params, opt_state, batch, mask, frozen)`.

    The arrays of the state are donated. On a mesh, batches are split over its axis "data".
    """
    shardings: dict[str, Any] = {}
    if mesh is not None:
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        shardings = {"in_shardings": (whole, rows, rows, whole), "out_shardings": whole}

    def step(state: tuple[Any, Any], *rest: Any) -> tuple[Any, Any]:
        return unpacked(*state, *rest)

    return jax.jit(step, donate_argnums=0, **shardings).lower(*args)


def build_step(
    chain: TrainingChain, model: nn.Module, mesh: jax.sharding.Mesh | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Builds `step(params, opt_state, batch, mask, frozen) -> (params, opt_state)` of a config."""
    if not chain.config.method.private:
        return make_step(
            lambda frozen: _plain_gradient(chain, model, mesh, frozen), chain.optimizer
        )
    options = {"microbatch_size": chain.config.microbatch_size, "mesh": mesh}
    return make_step(
        lambda frozen: private_gradient(_loss(chain, model, frozen), chain.clip, **options),
        chain.optimizer,
    )


def make_step(
    gradient_of: Callable[[Any], Callable[..., Any]], optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Any, Any]]:
    """Makes `step(params, opt_state, batch, mask, frozen) -> (params, opt_state)` to trace.

    Args:
        gradient_of: Returns `gradient(params, opt_state, examples, mask, indices)` from `frozen`.
        optimizer: The whole chain.
    """

    def step(
        params: Any, opt_state: Any, batch: Resident | Loaded, mask: jax.Array, frozen: Any
    ) -> tuple[Any, Any]:
        gradient = gradient_of(frozen)
        grads = gradient(params, opt_state, batch.examples(), mask, batch.indices)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def private_gradient(
    loss_fn: Callable[..., Any], clip: dpoptax.Clip | float, **options: Any
) -> Callable[..., Any]:
    """Returns the clipped gradient of a loss, at the points and with the key of the state.

    Args:
        loss_fn: As for `clipped_grad`.
        clip: As for `clipped_grad`.
        **options: Of `clipped_grad`. Auxiliary outputs, which are private, are dropped.
    """
    clipped_grad = dpoptax.clipped_grad(loss_fn, clip, **options)

    def gradient(
        params: Any, opt_state: Any, batch: Any, mask: jax.Array, indices: jax.Array
    ) -> Any:
        points = dpoptax.gradient_points(opt_state, params)
        key = step_key(opt_state)
        ids = None if key is None else indices
        clipped = clipped_grad(points, batch, mask, key=key, ids=ids)
        return clipped[0] if options.get("has_aux") else clipped

    return gradient


def _loss(chain: TrainingChain, model: nn.Module, frozen: Any) -> Callable[..., Any]:
    """Returns the loss of one example, or of one user."""
    loss = chain.config.method.loss(example_loss(model, frozen))
    return per_user_loss(loss) if chain.config.unit == "user" else loss


def _plain_gradient(
    chain: TrainingChain, model: nn.Module, mesh: jax.sharding.Mesh | None, frozen: Any
) -> Callable[..., Any]:
    config = chain.config
    loss = _loss(chain, model, frozen)

    def total_loss(params: Any, batch: Any, mask: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0))(params, batch), where=mask)

    def whole(params: Any, batch: Any, mask: jax.Array) -> Any:
        def sums(batch: Any, mask: jax.Array) -> tuple[Any, None]:
            return jax.grad(total_loss)(params, batch, mask), None

        return dpoptax.extend.in_microbatches(sums, config.microbatch_size)(batch, mask)[0]

    if mesh is not None:
        local = whole
        whole = jax.shard_map(
            lambda *args: jax.lax.psum(local(*args), "data"),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )

    def gradient(
        params: Any, opt_state: Any, batch: Any, mask: jax.Array, indices: jax.Array
    ) -> Any:
        total = whole(params, batch, mask)
        # Divided by the expected size like the private gradient, not by the realised one.
        return jax.tree.map(lambda leaf: leaf / config.batch_size, total)

    return gradient
