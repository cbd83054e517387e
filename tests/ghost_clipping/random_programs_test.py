"""Tests ghost clipping on small random programs and on flax models."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import dpoptax
from dpoptax._ghost_clipping import cost_model, plan
from tests.ghost_clipping.comparison import QUICK, both, close
from tests.helpers import cancellations
from tests.networks import Network

pytestmark = pytest.mark.usefixtures("no_room")

_DIM = 4


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _use(kind, w, x):
    """Combines a 4×4 parameter with (T, 4) data linearly, so that nothing saturates."""

    def conv(x, w, **options):
        numbers = ("NCW", "OIW", "NCW")
        out = jax.lax.conv_general_dilated(
            x.T[None], w, (1,), "SAME", dimension_numbers=numbers, **options
        )
        return out[0].T

    def standardized(w):
        w = w - w.mean(0)
        return w * jax.lax.rsqrt(jnp.mean(w**2, 0) + 1e-3)

    return {
        "dot": lambda: x @ w,
        "dot of transpose": lambda: x @ w.T,
        "from the left": lambda: (w @ x.T).T,
        "reshaped": lambda: jnp.einsum("tab,abc->tc", x.reshape(-1, 2, 2), w.reshape(2, 2, _DIM)),
        "batched": lambda: jnp.einsum(
            "tha,hac->thc", x.reshape(-1, 2, 2), w.reshape(2, 2, _DIM)
        ).sum(1),
        "halves": lambda: x[:, :2] @ w[:2] - x[:, 2:] @ w[2:],
        "overlapping": lambda: x[:, :3] @ w[:3] + x[:, 1:] @ w[1:],
        "lookup": lambda: x + w[jnp.argmax(x, axis=-1)],
        "scaled": lambda: x * w[0] + w[:, 1],
        "pointwise convolution": lambda: conv(x, 0.5 * w[:, :, None]),
        "depthwise convolution": lambda: conv(x, w[:, None, :3], feature_group_count=_DIM),
        "normalized": lambda: x @ (w / jnp.linalg.norm(w)),
        "standardized": lambda: x @ standardized(w),
        "standardized convolution": lambda: conv(x, standardized(w)[:, :, None]),
        "weight norm": lambda: x @ (w / jnp.linalg.norm(w, axis=1, keepdims=True)),
        "merged": lambda: x @ (w - 0.5 * w @ w),
        "scan": lambda: jax.lax.scan(lambda c, r: (jnp.tanh(c @ w + r),) * 2, x[0], x)[1],
        "scan of rows": lambda: jax.lax.scan(lambda c, r: (c + r, None), x, w)[0],
        "remat": lambda: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
        "product": lambda: x @ w @ w,
        "param product": lambda: x @ (w @ w),
    }[kind]()


_KINDS = (
    "dot", "dot of transpose", "from the left", "reshaped", "batched", "halves", "overlapping",
    "lookup", "scaled", "pointwise convolution", "depthwise convolution", "normalized", "scan",
    "scan of rows", "remat", "product", "param product", "standardized", "standardized convolution",
    "weight norm", "merged",
)  # fmt: skip
# Pulled-back gradients may cancel, like those of two points. The bound on their norm is then
# looser.
_PULLED = {"normalized", "standardized", "standardized convolution", "weight norm", "merged"}
_layers = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 1)), min_size=1, max_size=3)


def _compare(layers, length, count, seed, tolerance=None):
    if tolerance is None:
        cancels = count > 1 or any(kind in _PULLED for kind, _ in layers)
        tolerance = 5e-4 if cancels else 1e-5

    def loss(params, x):
        for kind, which in layers:
            x = jnp.sin(_use(kind, params[which], x))
        return jnp.sum(x**2)

    rng = np.random.default_rng(seed)
    params = [[_normal(rng, _DIM, _DIM) for _ in range(2)] for _ in range(max(2, count))]
    points = dpoptax.GradientPoints(tuple(params[:count]), (0.7, 0.3, -0.6)[:count])
    batch = _normal(rng, 3, length, _DIM)
    with cancellations() as seen:
        sums = both(Network(loss, None, None), dpoptax.normalized_clip(0.5), points, batch)
        jax.effects_barrier()
    if max(seen, default=1.0) > 8.0:  # near M, where the term norms clip the gradient
        reject()
    close(*sums, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.optimized
@settings(max_examples=40, deadline=None)
@given(layers=_layers, length=st.integers(1, 5), count=st.integers(1, 2), seed=st.integers(0, 99))
def test_random_programs(layers, length, count, seed):
    _compare(layers, length, count, seed)


@pytest.mark.slow
@pytest.mark.optimized
@settings(max_examples=25, deadline=None)
@given(layers=_layers, length=st.integers(1, 5), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_random_programs_with_inner_products(layers, length, count, seed):
    """Forces inner products instead of formed gradients. Norm bounds may exceed norms."""
    with (
        mock.patch.object(plan, "has_one_position", return_value=False),
        mock.patch.object(cost_model, "choose_method", return_value="gram"),
    ):
        _compare(layers, length, count, seed, tolerance=5e-4 if count == 1 else 2e-3)


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, tokens, *, deterministic):
        x = linen.Embed(7, 8)(tokens)
        x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x))
        x = linen.Dropout(0.3)(x, deterministic=deterministic)
        x = linen.RNN(linen.OptimizedLSTMCell(4))(linen.relu(linen.Dense(6)(x)))
        x = linen.Conv(5, (3,))(x)
        return linen.Dense(3)(linen.GroupNorm(1)(x).mean(0))


@pytest.mark.slow
def test_linen_model():
    module = _Linen()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 7, (3, 5)))
    init = jax.jit(functools.partial(module.init, deterministic=True), compiler_options=QUICK)
    params = init(jax.random.key(1), tokens[0])["params"]

    def loss(params, tokens, key):
        out = module.apply({"params": params}, tokens, deterministic=False, rngs={"dropout": key})
        return jnp.sum(jnp.sin(out))

    network = Network(loss, None, None, keyed=True)
    close(*both(network, dpoptax.l2_clip(0.3), dpoptax.gradient_points((), params), tokens))
    explanation = dpoptax.explain(loss, params, tokens[0], key=jax.random.key(0))
    assert explanation.fallbacks == ()


@pytest.mark.slow
def test_nnx_model():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.silu(self.norm(self.conv(x))).mean((0, 1)))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)(x) ** 2)

    batch = _normal(np.random.default_rng(0), 3, 6, 6, 2)
    points = dpoptax.gradient_points((), nnx.as_pure(params))
    close(*both(Network(loss, None, None), dpoptax.l2_clip(0.3), points, batch))
