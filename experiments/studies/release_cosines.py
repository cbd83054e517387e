"""Measures how well releases keep the gradient's direction, per clip geometry."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from dpoptax._clips.clip import Clip
from dpoptax._random.keys import check_key
from experiments.studies.rows import Findings, Row, pick, verdict


def direction_clips(
    angle_norms: tuple[float, ...] = (0.3, 1.0, 3.0, 6.0),
) -> dict[str, Clip]:
    """Returns the compared geometries: l2, and angles bounded by a box or a norm."""
    return {
        "l2": dpoptax.l2_clip(1.0),
        "box, β = 1": dpoptax.contrib.hyperspherical_clip(1.0, beta=1.0),
        **{
            f"angles, ρ = {rho:g}": dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=rho)
            for rho in angle_norms
        },
    }


def heterogeneous_gradients(seed: int) -> tuple[Array, Array]:
    """Returns per-example gradients (256, 500) and their common direction.

    Each gradient is 0.4 times the common direction plus an individual direction, both of norm about
    1. A log-normal factor scales it, because norms differ between examples in training.
    """
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=500) / np.sqrt(500)
    gradients = 0.4 * truth + rng.normal(size=(256, 500)) / np.sqrt(500)
    gradients *= np.exp(0.5 * rng.normal(size=(256, 1)))
    return jnp.asarray(gradients, jnp.float32), jnp.asarray(truth, jnp.float32)


def release_cosines(
    gradients: Array,
    truth: Array,
    clips: Mapping[str, Clip],
    *,
    noise_multiplier: float,
    key: Array,
) -> dict[str, float]:
    """Returns the mean cosine between releases and the truth, per clip geometry.

    All geometries are compared at one noise multiplier and therefore at one (ε, δ). A better
    geometry has a larger cosine.

    Args:
      gradients: per-example gradients, (B, d).
      truth: the direction that a release should have, (d,).
      clips: the geometries by name.
      noise_multiplier: σ.
      key: a JAX key.
    """
    keys = jax.random.split(check_key(key), 8)
    return {
        name: float(_mean_cosine(clip, gradients, truth, noise_multiplier, keys))
        for name, clip in clips.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _mean_cosine(clip, gradients, truth, noise_multiplier, keys):
    total = sum_clipped(clip, gradients, None, None)
    clipped = dpoptax.extend.trust_clipped(total, clip, None)

    def one(key):
        noise = noise_multiplier * clip.sensitivity * jax.random.normal(key, total.shape)
        release = clipped.decode((total + noise) / len(gradients))
        length = jnp.linalg.norm(release) * jnp.linalg.norm(truth)
        return release @ truth / jnp.where(length > 0, length, 1.0)

    return jnp.mean(jax.vmap(one)(keys))


def rows(seed: int) -> list[Row]:
    """Computes the cosine between release and true gradient per geometry and noise."""
    clips = direction_clips()
    gradients, truth = heterogeneous_gradients(seed)
    found: list[Row] = []
    for multiplier in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        cosines = release_cosines(
            gradients, truth, clips, noise_multiplier=multiplier, key=jax.random.key(seed)
        )
        found += [
            {"geometry": name, "noise_multiplier": multiplier, "seed": seed, "cosine": cosine}
            for name, cosine in cosines.items()
        ]
    return found


def findings(rows: list[Row]) -> Findings:
    """Checks whether bounded angles keep directions better than bounded norms."""
    names = sorted(set(pick(rows, "geometry")))
    found: Findings = []
    for multiplier in (0.0, 1.0, 4.0):
        means = {
            name: pick(rows, "cosine", geometry=name, noise_multiplier=multiplier).mean()
            for name in names
        }
        best = max((name for name in names if name != "l2"), key=lambda name: means[name])
        found.append(
            (
                f"bounded angles keep the direction better, at noise multiplier {multiplier:g}",
                f"cosine {means['l2']:.2f} with the l2 clip, at most {means[best]:.2f} with angles "
                f"({best})",
                verdict(means[best] > means["l2"]),
            )
        )
    return found
