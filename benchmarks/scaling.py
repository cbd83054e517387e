"""Counts one device's work and communication in a sharded step. Runs no step.

    python -m benchmarks.scaling --devices 8 64 512 4096

The step is a clipped sum, noise, DOPPLER's filter and SGD, for a network of dense layers. It is
compiled for that many virtual CPU devices at one global batch size. The parameters are replicated
or sharded over all devices. The table shows the numbers of the compiled program for one device next
to those of the formulas, which are printed below the table.

XLA supports at most 2048 CPU devices in a process. For more devices, the step is lowered for an
abstract mesh and its collectives are counted before compilation. The other columns are then
computed from the formulas and shown in brackets.
"""

import dataclasses
import math
import os
import re
from typing import Any

LARGEST = 2048
_BYTES = {"f32": 4, "i32": 4, "s32": 4, "u32": 4, "ui32": 4, "bf16": 2, "pred": 1, "i1": 1}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A network of tanh layers, and the devices that train it."""

    devices: tuple[int, ...] = (8, 64, 512, 4096)
    """Numbers of devices."""
    width: int = 4096
    """Units per layer."""
    layers: int = 2
    """Number of layers."""
    batch_size: int = 65536
    """Examples per step, over all devices."""

    @property
    def parameters(self) -> int:
        """Returns d, the number of parameters."""
        return self.layers * self.width**2

    def flops(self, devices: int) -> float:
        """Returns the operations of the matrix products on one device.

        The forward pass and the weighted sum take 2·d·B/n each. The backward pass takes the same
        without the first layer. Norms are not included: the norm of a single row is a vector
        operation.
        """
        backward = 1 - 1 / self.layers
        return (2 + backward) * 2 * self.parameters * self.batch_size / devices

    def traffic(self, devices: int) -> float:
        """Returns the bytes that one device sends in a ring: 2·(n−1)/n·4·d.

        With replicated parameters this is one all-reduce of the sum. With sharded parameters it is
        an all-gather of the parameters and a reduce-scatter of the sum, half of the bytes each.
        """
        return 2 * (devices - 1) / devices * 4 * self.parameters


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step on one device.

    Attributes:
        counts: Number of collectives of each kind.
        sent: Bytes sent in collectives, with ring algorithms.
        flops: Floating-point operations; `None` if nothing was compiled.
        touched: Bytes read and written; `None` if nothing was compiled.
    """

    counts: dict[str, int]
    sent: float
    flops: float | None = None
    touched: float | None = None


def measure(problem: Problem, devices: int, split: bool) -> Cost:
    """Returns the cost of the program for `devices` devices."""
    import jax
    from jax.sharding import AbstractMesh, AxisType

    auto = (AxisType.Auto,)
    if devices > len(jax.devices()):
        step, args = make_step(problem, AbstractMesh((devices,), ("data",), axis_types=auto), split)
        text = step.trace(*args).lower(lowering_platforms=("cpu",)).as_text()
        found = lowered_collectives(text)
        return Cost(count(found), sent(found, devices))
    mesh = jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])
    step, args = make_step(problem, mesh, split)
    program = step.lower(*args).compile()
    found = compiled_collectives(program.as_text())
    costs = program.cost_analysis()
    return Cost(count(found), sent(found, devices), costs["flops"], costs["bytes accessed"])


def make_step(problem: Problem, mesh: Any, split: bool) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted step on `mesh`, and its arguments as sharded shapes."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import dpoptax

    spec = P("data") if split else P()

    def loss_fn(params: Any, x: Any) -> Any:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.sum(x)

    tx = optax.chain(
        dpoptax.gaussian_noise(
            noise_multiplier=1.0, batch_size=problem.batch_size, key=jax.random.key(0)
        ),
        dpoptax.doppler(b=[1 / 11, 1 / 11], a=[-9 / 11]),
        optax.sgd(0.1),
    )
    options = {"mesh": mesh, "param_specs": spec, "microbatch_size": problem.batch_size}
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0), **options)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        grads = grad_fn(dpoptax.gradient_points(state, params), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def on_mesh(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    weight = jax.ShapeDtypeStruct((problem.width, problem.width), jnp.float32)
    params = [weight] * problem.layers
    state = jax.tree.map(
        lambda x: on_mesh(x, spec if x.shape == weight.shape else P()),
        jax.eval_shape(tx.init, params),
    )
    batch = jax.ShapeDtypeStruct((problem.batch_size, problem.width), jnp.float32)
    args = [on_mesh(weight, spec)] * problem.layers, state, on_mesh(batch, P("data"))
    outputs = jax.tree.map(lambda x: x.sharding, args[:2])
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs), args


def compiled_collectives(text: str) -> list[tuple[str, int]]:
    """Returns the kind and result bytes of each collective in a compiled program."""
    pattern = rf"= (\([^=]*?\)|\S+) ({'|'.join(_KINDS)})(?:-start)?\("
    return [(kind, _size(result)) for result, kind in re.findall(pattern, text)]


def lowered_collectives(text: str) -> list[tuple[str, int]]:
    """Returns the same before compilation, one per operand; XLA combines them later."""
    names = "|".join(kind.replace("-", "_") for kind in _KINDS)
    found = []
    for match in re.finditer(rf'"stablehlo\.({names})"', text):
        result = re.compile(r"-> tensor<([\dx]*)(\w+)>").search(text, match.end())
        assert result is not None
        shape, dtype = result.groups()
        size = _BYTES[dtype] * math.prod(int(n) for n in shape.split("x") if n)
        found.append((match[1].replace("_", "-"), size))
    return found


def count(found: list[tuple[str, int]]) -> dict[str, int]:
    """Returns the number of collectives of each kind."""
    kinds = [kind for kind, _ in found]
    return {kind: kinds.count(kind) for kind in _KINDS if kind in kinds}


def sent(found: list[tuple[str, int]], devices: int) -> float:
    """Returns the bytes that one device sends, if each collective runs in a ring."""
    share = (devices - 1) / devices
    factors = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": devices * share}
    return sum(factors.get(kind, 1.0) * size for kind, size in found)


def _size(result: str) -> int:
    return sum(
        _BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
    )


def table(problem: Problem) -> str:
    """Returns the table in Markdown, with the formulas below it."""
    lines = [
        "| devices | parameters | GFLOP | arithmetic | GB touched | MB sent | arithmetic "
        "| collectives |",
        "|--:|:--|--:|--:|--:|--:|--:|:--|",
    ]
    for split in (False, True):
        for devices in problem.devices:
            cost = measure(problem, devices, split)
            kinds = ", ".join(f"{number} {kind}" for kind, number in cost.counts.items())
            flops = f"({problem.flops(devices) / 1e9:.1f})"
            touched = "–"
            if cost.flops is not None and cost.touched is not None:
                flops, touched = f"{cost.flops / 1e9:.1f}", f"{cost.touched / 1e9:.2f}"
            else:
                kinds += " before compilation"
            lines.append(
                f"| {devices} | {'split' if split else 'whole'} | {flops} "
                f"| {problem.flops(devices) / 1e9:.1f} | {touched} | {cost.sent / 1e6:.1f} "
                f"| {problem.traffic(devices) / 1e6:.1f} | {kinds} |"
            )
    d, batch = problem.parameters, problem.batch_size
    backward = 1 - 1 / problem.layers
    lines += [
        "",
        f"All numbers are for one device and one step; d = {d:,} parameters, B = {batch:,}.",
        f"GFLOP: (1 + {backward:g} + 1)·2·d·B/n for the forward pass, the backward pass without "
        "its first layer, and the weighted sum. The rest is element-wise work. Activations and "
        "norms shrink with n; noise, filter and update shrink only if parameters are split.",
        "MB sent: 2·(n−1)/n·4·d bytes in a ring, for an all-reduce, or for an all-gather of the "
        "parameters and a reduce-scatter of the sum.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    import tyro

    problem = tyro.cli(Problem, description=__doc__)
    largest = max((n for n in problem.devices if n <= LARGEST), default=1)
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={largest}"
    print(table(problem))


if __name__ == "__main__":
    main()
