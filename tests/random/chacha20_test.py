"""Tests of ChaCha20 noise: the RFC's test vectors, and every stage that accepts such a key."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from scipy import stats

import dpoptax
from dpoptax._random import chacha20, keys, tree_noise
from tests.helpers import slow_but

CLIP = dpoptax.l2_clip(0.5)
KEY = jnp.arange(8, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
RELEASE = {"noise_multiplier": 2.0, "batch_size": 4}
STRATEGY = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
STAGES = {
    "floating point": lambda key: dpoptax.gaussian_noise(**RELEASE, key=key),
    "fixed point": lambda key: dpoptax.gaussian_noise(**RELEASE, key=key, fixed_point=True),
    "correlated": lambda key: dpoptax.correlated_noise(STRATEGY, **RELEASE, key=key),
    "correlated, fixed point": lambda key: dpoptax.correlated_noise(
        STRATEGY, **RELEASE, key=key, fixed_point_clip=CLIP
    ),
}

# RFC 8439, sections 2.3.2 and A.1: key, counter, nonce, and the block.
VECTORS = [
    (
        bytes(range(32)), 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32), 0, "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32), 1, "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\x01", 1, "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
]  # fmt: skip


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize(("key", "counter", "nonce", "block"), VECTORS)
def test_blocks_match_the_rfc(key, counter, nonce, block, looped):
    words = chacha20.chacha20(
        jnp.asarray(np.frombuffer(key, "<u4")),
        jnp.full((2, 3), counter, jnp.uint32),
        np.frombuffer(bytes.fromhex(nonce), "<u4").tolist(),
        looped=looped,
    )
    want = np.frombuffer(bytes.fromhex(block), "<u4")
    np.testing.assert_array_equal(words, np.broadcast_to(want[:, None, None], (16, 2, 3)))


@pytest.mark.parametrize("largest", [3, 4], ids=["one large leaf", "none"])
def test_no_two_uses_of_a_key_share_a_block(largest, monkeypatch):
    """Nonces separate the steps, leaves, fingerprint and numbers of a run.

    SHA-512 replaces the cipher, which takes seconds without jit.
    """
    seen = []

    def recorded(key, counters, nonce, *, looped=False):
        del looped
        places = [(np.asarray(key).tobytes(), c, *nonce) for c in np.ravel(counters).tolist()]
        seen.extend(places)
        blocks = b"".join(hashlib.sha512(repr(place).encode()).digest() for place in places)
        words = np.frombuffer(blocks, np.uint32).reshape(-1, 16).T
        return jnp.asarray(words.reshape(16, *np.shape(counters)))

    monkeypatch.setattr(chacha20, "chacha20", recorded)
    monkeypatch.setattr(tree_noise, "_MAX_SIZE_TOGETHER", largest)
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    tx = STAGES["fixed point"](KEY)
    total = dpoptax.extend.trust_clipped(params, CLIP)
    with jax.disable_jit():
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(total, state, params)
    noise = [place for place in seen if place[2] == 2]
    assert len(noise) == len(set(noise)) == 2 * 8  # 7 numbers, the vector rounded up to even
    assert len({key for key, *_ in noise}) == 2  # one per step
    # Each key has one use: deriving keys, or noise.
    uses = {(key, use) for key, _, use, *_ in seen}
    assert len(uses) == len({key for key, _ in uses})


@pytest.mark.parametrize("name", slow_but(("floating point", "correlated, fixed point"), STAGES))
def test_noise_stages_accept_key_from_system(name):
    tx = STAGES[name](dpoptax.random_key_from_os("chacha20"))
    params = {"a": jnp.zeros((58, 50))}
    total = dpoptax.extend.trust_clipped(params, CLIP)
    update = jax.jit(tx.update)
    state, means = jax.jit(tx.init)(params), []
    for _ in range(2):
        mean, state = update(total, state, params)
        means.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(mean)]))
    if name in ("floating point", "fixed point"):
        assert abs(np.corrcoef(*means)[0, 1]) < 0.1
        assert stats.kstest(np.concatenate(means) / (2.0 * 0.5 / 4), "norm").pvalue > 1e-4
    (ledger,) = dpoptax.ledgers(state)
    assert ledger.releases == 2
    # Serializing the state preserves the noise that follows.
    stored = serialization.msgpack_serialize(serialization.to_state_dict(state))
    again = serialization.from_state_dict(state, serialization.msgpack_restore(stored))
    jax.tree.map(
        np.testing.assert_array_equal,
        update(total, again, params)[0],
        update(total, state, params)[0],
    )


def test_refuses_replaced_key():
    params, total = jnp.zeros(5), dpoptax.extend.trust_clipped(jnp.zeros(5), CLIP)
    tx = STAGES["fixed point"](KEY)
    state = tx.init(params)
    other = dataclasses.replace(state, key=KEY ^ np.uint32(1))
    assert np.isnan(tx.update(total, other, params)[0]).all()
    assert not np.isnan(tx.update(total, state, params)[0]).any()
    two = (state, STAGES["floating point"](KEY).init(params))
    with pytest.raises(ValueError, match="key"):
        dpoptax.ledgers(two)


def test_ensemble_has_one_key_per_member():
    many = jax.vmap(lambda i: keys.fold_in(KEY, i))(jnp.arange(3))
    total = dpoptax.extend.trust_clipped(jnp.zeros(4), CLIP)

    def first(key):
        tx = STAGES["floating point"](key)
        return tx.update(total, tx.init(jnp.zeros(4)))[0]

    together = jax.jit(jax.vmap(first))(many)
    alone = jax.jit(first)
    for i in range(3):
        np.testing.assert_array_equal(together[i], alone(many[i]))


def test_refuses_key_without_chacha20_support():
    clip = dpoptax.l2_clip(1.0)
    with pytest.raises(TypeError, match="must be a single key"):
        dpoptax.contrib.geodp(0.1, noise_multiplier=1.0, batch_size=4, key=KEY)
    tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=KEY)
    with jax.enable_x64(True):
        wide = dpoptax.extend.trust_clipped(jnp.zeros(3, jnp.float64), clip)
        with pytest.raises(TypeError, match="must be a single key"):
            tx.update(wide, tx.init(jnp.zeros(3)))
    two = jnp.stack([KEY, KEY + np.uint32(1)])
    with pytest.raises(TypeError, match=r"single key, got an array of shape \(2, 8\)"):
        dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=two)
    with pytest.raises(ValueError, match="got 'aes'"):
        dpoptax.random_key_from_os("aes")
