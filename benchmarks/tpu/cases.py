"""Defines the cases: model, batch, devices, and both training steps."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from benchmarks import models
from benchmarks.tpu.architectures import Architecture, gpt2, resnet_18, small, vit_s

LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its training setup.

    Attributes:
      model: makes the model.
      batch_size: examples per step, on all devices.
      fsdp: whether the parameters are split over the devices.
      topology: the devices.
    """

    model: Callable[[], Architecture]
    batch_size: int
    fsdp: bool = False
    topology: str = "v5e:2x4"


@dataclasses.dataclass(frozen=True)
class Options:
    """How the private step is computed.

    Attributes:
      clip: one norm for all parameters, or one for each.
      method: as of `dpoptax.clipped_grad`.
      precision: as of `dpoptax.clipped_grad`.
      microbatch_size: as of `dpoptax.clipped_grad`.
      mesh: whether `clipped_grad` gets the mesh; otherwise only `jit` knows it.
      noise: whether to add noise after the clipped sum.
    """

    clip: Literal["flat", "per-layer"] = "flat"
    method: Literal["auto", "vmap", "recompute", "streaming"] = "auto"
    precision: Literal["float32", "bfloat16"] | None = None
    microbatch_size: int | None = None
    mesh: bool = True
    noise: bool = True


def _big(layers: int, width: int) -> Architecture:
    return gpt2(
        128, layers=layers, width=width, heads=width // 128, dtype="bfloat16", remat=True,
        constrained=True,
    )  # fmt: skip


CASES = {
    "gpt2": Case(lambda: gpt2(128), 64),
    "gpt2-remat": Case(lambda: gpt2(128, remat=True), 64),
    "gpt2-bfloat16": Case(lambda: gpt2(128, dtype="bfloat16"), 64),
    "gpt2-1024": Case(lambda: gpt2(1024), 32),
    "gpt2-4096": Case(lambda: gpt2(4096, remat=True, query_block=512), 8),
    "gpt2-16384": Case(lambda: gpt2(16384, remat=True, query_block=512), 8),
    # The private step computes gradients twice, since one pass does not fit in memory.
    "gpt2-32768-untied": Case(lambda: gpt2(32768, remat=True, query_block=512, tied=False), 8),
    "big": Case(lambda: _big(24, 1792), 32, fsdp=True, topology="v5e:4x4"),  # 1.02 billion
    "10b": Case(lambda: _big(40, 4480), 128, fsdp=True, topology="v5e:8x8"),
    "resnet-18": Case(resnet_18, 256),
    "resnet-18-bfloat16": Case(lambda: resnet_18(dtype="bfloat16"), 256),
    "vit-s": Case(vit_s, 256),
    "vit-s-bfloat16": Case(lambda: vit_s(dtype="bfloat16"), 256),
    # Short steps, whose time is that of starting kernels.
    "mlp": Case(lambda: small(models.mlp()), 256, topology="h100"),
    "cnn": Case(lambda: small(models.cnn()), 256, topology="h100"),
    "transformer": Case(lambda: small(models.transformer(48, 128, 3)), 256, topology="h100"),
}


def batched(case: Case, model: Architecture) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch and of its mask."""
    size = case.batch_size
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), model.example)
    return batch, jax.ShapeDtypeStruct((size,), bool)


def plain_step(case: Case, model: Architecture) -> tuple[Callable[..., Any], Any]:
    """Returns a step of SGD on the masked mean loss, and its initial state."""
    tx = optax.sgd(LEARNING_RATE)

    def mean_loss(params: Any, batch: Any, mask: jax.Array) -> jax.Array:
        loss = jax.vmap(lambda example: model.loss_fn(params, example), spmd_axis_name=_axis(case))
        return jnp.sum(mask * loss(batch)) / case.batch_size

    def step(params: Any, state: Any, batch: Any, mask: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(mean_loss)(params, batch, mask), state, params)
        return optax.apply_updates(params, updates), state

    return step, jax.eval_shape(tx.init, model.params)


def private_step(
    case: Case, model: Architecture, options: Options, mesh: Mesh | None = None
) -> tuple[Callable[..., Any], Any]:
    """Returns a step of DP-SGD on the same loss, and the shapes of its initial state."""
    clip: Any = 1.0 if options.clip == "flat" else dpoptax.per_layer_clip(1.0)
    placed: dict[str, Any] = {"microbatch_size": options.microbatch_size or case.batch_size}
    if mesh is not None and options.mesh:
        specs = model.specs if case.fsdp else P()
        placed = {"microbatch_size": options.microbatch_size, "mesh": mesh, "param_specs": specs}
    grad_fn = dpoptax.clipped_grad(
        model.loss_fn,
        clip,
        method=options.method,
        precision=options.precision,
        **placed,
    )
    noise = dpoptax.gaussian_noise(
        noise_multiplier=1.0, batch_size=case.batch_size, key=jax.random.key(0)
    )
    sgd = optax.sgd(LEARNING_RATE)
    tx = optax.chain(noise, sgd)

    def step(params: Any, state: Any, batch: Any, mask: jax.Array) -> tuple[Any, Any]:
        clipped = grad_fn(dpoptax.gradient_points(state, params), batch, mask)
        updates, state = tx.update(clipped, state, params)
        return optax.apply_updates(params, updates), state

    def without_noise(params: Any, state: Any, batch: Any, mask: jax.Array) -> tuple[Any, Any]:
        total = grad_fn(params, batch, mask).sum
        mean = jax.tree.map(lambda x: x / case.batch_size, total)
        updates, state = sgd.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    if not options.noise:
        return without_noise, jax.eval_shape(sgd.init, model.params)
    return step, jax.eval_shape(tx.init, model.params)


def place(case: Case, model: Architecture, state: Any, mesh: Mesh) -> tuple[Any, ...]:
    """Returns the shapes of a step's arguments with their shardings on a mesh."""

    def put(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            jax.tree.broadcast(specs, tree),
        )

    batch, mask = batched(case, model)
    params = put(model.params, model.specs if case.fsdp else P())
    return params, put(state, P()), put(batch, P("data")), put(mask, P("data"))


def context(case: Case, mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Returns the context that sharding constraints in the loss refer to."""
    return jax.set_mesh(mesh) if case.fsdp else contextlib.nullcontext()


def _axis(case: Case) -> str | None:
    return "data" if case.fsdp else None


# Facts that XLA needs about an absent GPU.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def make_mesh(topology: str) -> Mesh:
    """Returns a mesh of absent devices: a topology such as "v5e:4x4", or "h100".

    "cpu" is this machine.
    """
    from jax.experimental import topologies

    if topology == "cpu":
        return Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    # Without these, the libraries look for devices. Nothing is executed, so processes may share
    # libtpu.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }.items():
        os.environ.setdefault(name, value)
    if topology == "h100":
        found = topologies.get_topology_desc(
            topology_name="", platform="cuda", target_config=_H100, topology="1x1x1"
        )
    else:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(found.devices).reshape(-1), ("data",))
