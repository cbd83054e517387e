"""Measures how loose the norm bound of ghost clipping is during training.

    python -m benchmarks.cancellation [--mnist DIR]

The bound of a clipped sum uses two numbers for each example; see
`dpoptax._rounding.bounds`. n⁺ is an upper bound of the norm of its gradient. S is the
absolute size of the gradient: the sum of the norms of its terms. If S/n⁺ exceeds a limit M for some
parameter, the example is clipped more than its norm requires.

This program trains several models privately and measures 256 examples at several steps. It prints
the distribution of S/n⁺, the largest share of M, and the excess of n⁺ over the norm of the
gradient. It also prints τ, the share of the clipping bound that is reserved for rounding the sum.
"""

import inspect
import turtle
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits
from tqdm import tqdm

import dpoptax
from benchmarks.models import MODELS, Problem, cnn_loss, images
from dpoptax._ghost_clipping.make_plan import make_plan
from dpoptax._ghost_clipping.records.record_points import record_points
from dpoptax._ghost_clipping.sums.example_gradients import collect_gradients
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import make_pieces, sum_rounding
from dpoptax._losses.read_program import read_program
from dpoptax._losses.trace_loss import trace_loss
from dpoptax._rounding.block_sums import WholeBatch

STEPS = (0, 50, 300)


@dataclass
class Config:
    """Trains several models and prints how much the terms of their gradients cancel."""

    mnist: Path | None = None
    """Folder with MNIST's IDX files. Without it, no model is trained on MNIST."""


def digits_cnn():
    """Returns a CNN with two convolutions and two dense layers, and 8 × 8 digits."""
    digits = load_digits()
    data = jnp.asarray(digits.images[..., None] / 16.0, jnp.float32), jnp.asarray(digits.target)
    return _image_cnn(8), data


def mnist_cnn(folder):
    """Returns the same network and the images of MNIST, 28 × 28."""
    from experiments.data.formats import read_idx

    images = read_idx(folder / "train-images-idx3-ubyte.gz", 3)[:8192]
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 1)[:8192]
    return _image_cnn(28), (jnp.asarray(images[..., None] / 255.0), jnp.asarray(labels))


def _image_cnn(size):
    keys = jax.random.split(jax.random.key(0), 4)
    flat = (size // 4) ** 2 * 32
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "hidden": (flat, 64)}
    shapes["output"] = (64, 10)
    params = {
        name: {
            "kernel": jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1])),
            "bias": jnp.zeros(shape[-1]),
        }
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return Problem(params, cnn_loss, lambda count: images(count, (size, size, 1)))


def digits_mlp():
    """Returns a network with one hidden layer, and the digits."""
    digits = load_digits()
    problem = MODELS["mlp"](64)
    params = dict(problem.params)
    kernel = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    params["hidden"] = {"kernel": kernel, "bias": jnp.zeros(64)}
    data = jnp.asarray(digits.data / 16.0, jnp.float32), jnp.asarray(digits.target)
    return problem._replace(params=params), data


def text_transformer():
    """Returns a two-block transformer, and rows of 64 characters of Python source."""
    text = np.frombuffer(inspect.getsource(turtle).encode("ascii", "replace"), np.uint8)
    rows = text[: len(text) // 65 * 65].reshape(-1, 65).astype(np.int32)
    return MODELS["transformer"](width=64, layers=2, vocabulary=128), (rows[:, :-1], rows[:, 1:])


METHODS = {
    "DP-SGD": (),
    "DiSK, γ = 0.5": (dpoptax.disk(0.7, 0.5),),
    "DiSK, γ = 0.05": (dpoptax.disk(0.7, 0.05),),
    "DP-PMLF": (dpoptax.pmlf(2, 0.1, *dpoptax.filters.preset("pmlf-mnist")),),
}


def sizes(problem, points, batch):
    """Returns n⁺, S, S over M and the gradient norm of every example, and τ."""
    mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    params = points.points[0]
    program = read_program(trace_loss(problem.loss_fn, params, example, None, has_aux=False))
    records = record_points(program, points, jax.tree.leaves(batch))
    plan = make_plan(program, len(mask), len(points.points))
    groups = dpoptax.l2_clip(1.0).groups(params)
    pieces = collect_gradients(plan, records, groups, differences=True)
    measured = make_pieces(pieces, groups)
    ratios = [piece.ratio for piece in measured]
    square, absolute = map(jnp.stack, zip(*(piece.size for piece in measured), strict=True))
    upper, absolute, limited = (
        jnp.sqrt(jnp.sum(x**2, axis=0))
        for x in (jnp.sqrt(square), absolute, absolute / np.array(ratios)[:, None])
    )

    def gradient(example):
        grads = [jax.grad(problem.loss_fn)(point, example) for point in points.points]
        total = jax.tree.map(
            lambda *g: sum(w * x for w, x in zip(points.weights, g, strict=True)), *grads
        )
        return optax.tree.norm(total)

    tau = sum_rounding(pieces, WholeBatch(len(mask)))
    return upper, absolute, limited, jax.vmap(gradient)(batch), tau


def main(config: Config) -> None:
    """Trains all models and prints one table."""
    problems = {"digits, MLP": digits_mlp, "digits, CNN": digits_cnn}
    problems["text, transformer"] = text_transformer
    if config.mnist is not None:
        problems["MNIST, CNN"] = lambda: mnist_cnn(config.mnist)
    print("| model | method | step | median S/n⁺ | largest | of M | n⁺/n − 1, largest | τ |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in problems.items():
        problem, data = make()
        count = len(jax.tree.leaves(data)[0])
        batch_size = 64 if name.startswith("text") else 256
        for method, stages in METHODS.items():
            tx = optax.chain(
                dpoptax.gaussian_noise(
                    noise_multiplier=1.0, batch_size=batch_size, key=jax.random.key(1)
                ),
                *stages,
                optax.adam(1e-3),
            )
            grad_fn = dpoptax.clipped_grad(problem.loss_fn, dpoptax.l2_clip(1.0))

            @jax.jit
            def step(params, state, batch, tx=tx, grad_fn=grad_fn):
                points = dpoptax.gradient_points(state, params)
                updates, state = tx.update(grad_fn(points, batch), state, params)
                return optax.apply_updates(params, updates), state

            measure = jax.jit(lambda points, batch, problem=problem: sizes(problem, points, batch))
            params, state = problem.params, tx.init(problem.params)
            rng = np.random.default_rng(0)
            for t in tqdm(range(max(STEPS) + 1), desc=f"{name}, {method}", leave=False):
                index = rng.integers(count, size=batch_size)
                batch = jax.tree.map(lambda x, i=index: jnp.asarray(x[i]), data)
                if t in STEPS:
                    points = dpoptax.gradient_points(state, params)
                    upper, absolute, limited, norm, tau = map(np.asarray, measure(points, batch))
                    ratio, share = absolute / upper, np.max(limited / upper)
                    print(
                        f"| {name} | {method} | {t} | {np.median(ratio):.2f} | {ratio.max():.2f} "
                        f"| {share:.0%} | {np.max(upper / norm) - 1:.1e} | {tau:.2%} |",
                        flush=True,
                    )
                params, state = step(params, state, batch)


if __name__ == "__main__":
    main(tyro.cli(Config))
