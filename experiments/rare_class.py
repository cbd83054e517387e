"""Measures what the clipping bound does to the predictions of a rare class."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize, special, stats
from sklearn.datasets import load_digits

import dpoptax
from dpoptax.training.bars import Bar
from dpoptax.training.run.files import markdown_table
from experiments.data.images import load_mnist
from experiments.digits.arms import Columns
from experiments.spreads import mean_and_deviation

EPSILON, DELTA = 3.0, 1e-5
BOUNDS, RATES = (0.1, 1.0, 3.0, 10.0, 30.0), (0.01, 0.03, 0.1)
_HEADS = ("C", "rate", "clipped", "mean prediction", "shift", "AUC", "log loss", "shifted")
_ABOUT = (
    "# The clipping bound and a rare class\n\n"
    f"A network with 32 hidden units and one logit, trained by Adam. δ = {DELTA:g}. Each row has "
    "the learning rate with the least log loss, which ε does not cover. Numbers are means and "
    "standard deviations over seeds, which change data, start, batches and noise. *Clipped* is the "
    "percentage of clipped gradients of rare training examples after training, and *mean "
    "prediction* that of the test data in percent. *Shift* is added to all logits to make it the "
    "rate of the test data, and *shifted* is the log loss after that.\n"
)


def synthetic(rng: np.random.Generator) -> tuple[Columns, Columns]:
    """Returns 16,000 training and as many test examples of a logistic model."""
    inputs = rng.normal(size=(32_000, 12)).astype(np.float32)
    chances = special.expit(inputs[:, 0] + 0.7 * inputs[:, 1] - 3.4)
    labels = (rng.random(32_000) < chances).astype(np.float32)
    return (inputs[:16_000], labels[:16_000]), (inputs[16_000:], labels[16_000:])


def thinned(columns: Columns, share: float, rng: np.random.Generator) -> Columns:
    """Returns images in random order, labeled by whether they are an 8, with a share of eights."""
    inputs, labels = columns
    eights, others = (rng.permutation(np.flatnonzero((labels == 8) == is8)) for is8 in (1, 0))
    rows = np.concatenate([others, eights[: round(len(others) * share / (1 - share))]])
    rows = rng.permutation(rows)
    return inputs[rows], (labels[rows] == 8).astype(np.float32)


def digits(rng: np.random.Generator) -> tuple[Columns, Columns]:
    """Returns 1,000 training digits and the others for the test, 5 % of them eights."""
    found = load_digits()
    inputs, labels = thinned(((found.data / 16).astype(np.float32), found.target), 0.05, rng)
    return (inputs[:1000], labels[:1000]), (inputs[1000:], labels[1000:])


def mnist(data: list[Columns], rng: np.random.Generator) -> tuple[Columns, Columns]:
    """Returns the images of MNIST with means of 2 × 2 pixels, 2 % of them eights."""
    pooled = ((x.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)), labels) for x, labels in data)
    train, test = (thinned((x.reshape(-1, 196), labels), 0.02, rng) for x, labels in pooled)
    return train, test


def initial_params(key: jax.Array, inputs: int) -> dict[str, jax.Array]:
    """Returns the parameters of a network with 32 hidden units."""
    first, second = jax.random.split(key)
    hidden = jax.random.normal(first, (inputs, 32)) / np.sqrt(inputs)
    head = jax.random.normal(second, (32,)) / np.sqrt(32)
    return {"hidden": hidden, "hidden_bias": jnp.zeros(32), "head": head, "bias": jnp.zeros(())}


def logits(params: Any, inputs: Any) -> jax.Array:
    """Returns the logit of the rare class."""
    hidden = jnp.tanh(inputs @ params["hidden"] + params["hidden_bias"])
    return jnp.asarray(hidden @ params["head"] + params["bias"])


def loss_fn(params: Any, example: Any) -> jax.Array:
    """Returns the cross-entropy of an example."""
    return optax.sigmoid_binary_cross_entropy(logits(params, example[0]), example[1])


@functools.partial(jax.jit, static_argnames=("sigma", "batch_size"))
def trained(start: Any, bound: Any, rate: Any, *, sigma: float, batch_size: int) -> Any:
    """Trains with a traced bound: the loss is divided by it, and each release multiplied."""
    params, key, samples, data = start
    noise = dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=batch_size, key=key)
    tx = optax.chain(noise, optax.scale(bound), optax.adam(rate))
    grad_fn = dpoptax.clipped_grad(lambda p, e: loss_fn(p, e) / bound, 1.0)

    def step(carry: Any, sample: Any) -> Any:
        params, state = carry
        rows = jax.tree.map(lambda column: column[sample.indices], data)
        updates, state = tx.update(grad_fn(params, rows, sample.mask), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), samples)[0][0]


def rare_norms(params: Any, columns: Columns) -> np.ndarray:
    """Returns the norms of the gradients of at most 100 rare examples."""
    return np.asarray(_norms(params, tuple(c[columns[1] == 1][:100] for c in columns)))


_norms = jax.jit(functools.partial(dpoptax.gradient_norms, loss_fn))


def scores(params: Any, bound: float, train: Columns, test: Columns) -> list[float]:
    """Returns the numbers of the table from "clipped" on, in its order."""
    z, y = np.asarray(logits(params, test[0]), np.float64), test[1]
    auc = stats.mannwhitneyu(z[y == 1], z[y == 0]).statistic / (y.sum() * (1 - y).sum())
    shift = optimize.brentq(lambda b: special.expit(z + b).mean() - y.mean(), -40, 40)
    losses = [np.logaddexp(0, (1 - 2 * y) * (z + b)).mean() for b in (0.0, shift)]
    clipped = (rare_norms(params, train) > bound).mean()
    return [100 * clipped, 100 * special.expit(z).mean(), shift, auc, *losses]


def start_of(seed: int, train: Columns, batch_size: int, steps: int) -> Any:
    """Returns parameters, noise key, batches and data of a seed."""
    key = jax.random.key(seed)
    sampler = dpoptax.sampling.PoissonSampler(len(train[1]), batch_size, seed=seed)
    samples = jax.tree.map(lambda *rows: np.stack(rows), *sampler.samples(0, steps))
    return initial_params(key, train[0].shape[1]), jax.random.fold_in(key, 1), samples, train


def row_of(bound: float, data: Any, train_on: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the row of a bound, at its best learning rate."""
    tried = []
    for rate in RATES:
        each = [scores(train_on(start, bound, rate), bound, *columns) for start, columns in data]
        tried.append((rate, np.transpose(each)))
    rate, columns = min(tried, key=lambda found: found[1][4].mean())
    return f"{bound:g}", f"{rate:g}", *map(mean_and_deviation, columns, (0, 2, 1, 3, 3, 3))


def section(title: str, split: Callable[..., Any], batch_size: int, steps: int, seeds: int) -> str:
    """Returns the tables of a data set, without noise and at ε."""
    columns = [split(np.random.default_rng(seed)) for seed in range(seeds)]
    starts = [start_of(seed, c[0], batch_size, steps) for seed, c in enumerate(columns)]
    (train, test), size = columns[0], len(columns[0][0][1])
    sigma = dpoptax.accounting.calibrate(
        epsilon=EPSILON, delta=DELTA, steps=steps, sampling_probability=batch_size / size
    )
    rate, rate_of_test = (100 * labels.mean() for _, labels in (train, test))
    norm = np.median(rare_norms(starts[0][0], train))
    text = (
        f"\n## {title}\n\nN = {size:,}, B = {batch_size:,}, {steps} steps, {rate:.2f} % rare, "
        f"{rate_of_test:.2f} % in the test data. "
        f"Before training, rare gradients have norm {norm:.1f}.\n"
    )
    for name, noise in ("without noise", 0.0), (f"ε = {EPSILON:g}", sigma):
        train_on = functools.partial(trained, sigma=noise, batch_size=batch_size)
        data = list(zip(starts, columns, strict=True))
        rows = [row_of(bound, data, train_on) for bound in Bar(BOUNDS, title, leave=False)]
        text += f"\n### {title}, {name}\n\n{markdown_table(_HEADS, rows)}\n"
    return text


def rare_class_page(*, data_dir: Path | None = None, seeds: int = 5) -> str:
    """Measures what the clipping bound does to the predictions of a rare class.

    Args:
        data_dir: Folder with MNIST. None: only the data sets that need no folder.
        seeds: Number of runs of each row.
    """
    page = _ABOUT + section("Synthetic", synthetic, 800, 200, seeds)
    page += section("Digits, eights", digits, 250, 100, seeds)
    if data_dir is not None:
        data = load_mnist(data_dir, "mnist", ("mnist", "MNIST/raw"))
        parts = [
            (np.asarray(p["inputs"]), np.asarray(p["labels"])) for p in (data.train, data.test)
        ]
        page += section("MNIST, eights", functools.partial(mnist, parts), 1000, 200, seeds)
    return page
