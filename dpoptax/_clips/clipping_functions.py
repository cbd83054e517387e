"""Provides further clip geometries: other functions of the norm, and per layer."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from dpoptax._clips.clip import BoundedClip, Clip, L2Clip, clip_norm
from dpoptax._support.tree import PyTree

# Below this norm the factor C/‖g‖ stays constant, so that it is a finite float32.
_MINIMUM_NORM = 2.0**-90


@dataclasses.dataclass(frozen=True)
class AutomaticClip(BoundedClip):
    """Scales to C/(‖g‖ + γ) g; see `automatic_clip`."""

    gamma: float

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns C/(‖g‖ + γ)."""
        return self.l2_clip_norm / jnp.maximum(norms + self.gamma, _MINIMUM_NORM)


def automatic_clip(l2_clip_norm: float, gamma: float = 0.01) -> AutomaticClip:
    """Normalizes each example's gradient, without a threshold: g ↦ C g/(‖g‖ + γ).

    This is AUTO-S for γ > 0 and AUTO-V for γ = 0. C scales both the sum and its noise: with SGD it
    is part of the learning rate, with Adam it has no effect. γ keeps information that AUTO-V loses:
    a gradient much shorter than γ stays proportionally short. A zero gradient stays zero in both,
    and AUTO-V shortens gradients below about 1e-12 to less than C.

    Privacy: one example adds at most C to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C, from 1e-12 to 1e9.
      gamma: γ ≥ 0, in the units of the gradient of one example's loss.

    Raises:
      ValueError: a number is outside its range.

    Source: Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and
    Stronger", 2023.

    >>> automatic_clip(1.0).factors(jnp.array([0.99, 9.99]))
    Array([1. , 0.1], dtype=float32)
    """
    gamma = float(gamma)
    if not (math.isfinite(gamma) and gamma >= 0.0):
        raise ValueError(
            f"`gamma` must be a finite number of at least 0, got {gamma}. 0 gives AUTO-V."
        )
    return AutomaticClip(clip_norm("l2_clip_norm", l2_clip_norm), gamma)


@dataclasses.dataclass(frozen=True)
class NormalizedClip(Clip):
    """Scales to min(1/C, 1/‖g‖) g; see `normalized_clip`."""

    l2_clip_norm: float

    @property
    def sensitivity(self) -> float:
        """Returns 1, since the sum is in units of C."""
        return 1.0

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns min(1/C, 1/‖g‖)."""
        return 1.0 / jnp.maximum(self.l2_clip_norm, norms)


def normalized_clip(l2_clip_norm: float) -> NormalizedClip:
    """Clips to C and divides by C: g ↦ min(1/C, 1/‖g‖) g.

    This is `l2_clip` in units of C. The noise and the learning rate no longer depend on C, so C and
    the learning rate can be tuned one after the other.

    Privacy: one example adds at most 1 to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C, in the units of the gradient of one example's loss, from 1e-12 to 1e9.

    Raises:
      ValueError: `l2_clip_norm` is outside of this range.

    Source: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022.

    >>> normalized_clip(5.0).sensitivity
    1.0
    """
    return NormalizedClip(clip_norm("l2_clip_norm", l2_clip_norm))


@dataclasses.dataclass(frozen=True)
class PerLayerClip(Clip):
    """Applies a clip to each layer; see `per_layer_clip`."""

    clips: tuple[Clip, ...]
    layers: jax.tree_util.PyTreeDef | None

    @property
    def sensitivity(self) -> float:
        """Returns √Σ C_l², or C if one clip is split over all leaves."""
        return math.hypot(*(clip.sensitivity for clip in self.clips))

    def groups(self, tree: PyTree) -> list[int]:
        """Returns one group for each layer: a subtree with its own clip, or every leaf."""
        if self.layers is None:
            return list(range(len(jax.tree.leaves(tree))))
        try:
            subtrees = self.layers.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"The layers of `per_layer_clip` must be a tree prefix of the gradients: {error}"
            ) from error
        return [i for i, layer in enumerate(subtrees) for _ in jax.tree.leaves(layer)]

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns the factors of each layer's clip at the layer's norm."""
        if self.layers is None:
            return _split_bound(self.clips[0], norms.shape[-1]).factors(norms)
        columns = [clip.factors(norms[..., i : i + 1]) for i, clip in enumerate(self.clips)]
        return jnp.concatenate(columns, axis=-1)

    @property
    def splits(self) -> bool:
        """Returns whether the bound of every layer can be split over its parts."""
        return all(isinstance(clip, BoundedClip) for clip in self.clips)

    def split(self, group: int, groups: int, parts: int) -> Clip:
        """Returns a group's clip with bound C_l/√parts, for `groups` groups in total."""
        if self.layers is None:
            return _split_bound(self.clips[0], groups * parts)
        return _split_bound(self.clips[group], parts)


def per_layer_clip(clips: PyTree) -> PerLayerClip:
    """Clips each layer of each example's gradient separately: g_l ↦ f_l(‖g_l‖) g_l.

    For a number C_l, f_l is the factor of `l2_clip`, min(1, C_l/‖g_l‖). For a flat geometry it is
    that geometry's factor: `per_layer_clip(automatic_clip(1.0))` is layer-wise automatic clipping,
    f_l = C_l/(‖g_l‖ + γ). A layer with long gradients no longer shortens the others. Clipping and
    summing one layer needs no other layer's norm.

    Privacy: one example adds at most C_l to the sum in layer l, and at most √Σ C_l² to the whole
    sum, in l2 norm. The noise of every layer is scaled to the latter. An example with a non-finite
    gradient in any layer adds exactly zero to all.

    Args:
      clips: a tree that is a prefix of the parameters, with one bound C_l, or one flat geometry of
        sensitivity C_l, for each subtree, such as {"encoder": 1.0, "head": automatic_clip(0.1)}.
        Use a list if the parameters are a list. A single bound or geometry with bound C makes every
        one of the m leaves a layer with C_l = C/√m, and keeps other settings such as γ.

    Raises:
      TypeError: a geometry is not flat, because it encodes, follows a threshold, or has layers.
      ValueError: `clips` is empty, a bound is not positive and finite, or the sensitivity of a
        single geometry does not depend on its bound, as with `normalized_clip`. At the call: the
        tree is not a prefix of the gradients.

    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018; for
    automatic clipping, Bu et al., 2023.

    >>> per_layer_clip({"encoder": 3.0, "head": 4.0}).sensitivity
    5.0
    >>> per_layer_clip(automatic_clip(1.0)).factors(jnp.array([4.99, 0.99, 0.49, 1.99]))
    Array([0.1 , 0.5 , 1.  , 0.25], dtype=float32)
    """
    given, layers = jax.tree.flatten(clips)
    if not given:
        raise ValueError(f"`clips` must hold at least one bound, got {clips!r}.")
    flat = tuple(_flat_clip(clip) for clip in given)
    if not jax.tree_util.treedef_is_leaf(layers):
        return PerLayerClip(flat, layers)
    # Raises here if the bound of a single clip cannot be split, not only at the first step.
    _split_bound(flat[0], 1)
    return PerLayerClip(flat, None)


def _flat_clip(given: Clip | float) -> Clip:
    """Returns a geometry that scales whole gradients; `l2_clip` for a number."""
    if not isinstance(given, Clip):
        return L2Clip(clip_norm("clips", given))
    if given.encodes or given.own_stage or type(given).groups is not Clip.groups:
        raise TypeError(
            f"`clips` must hold bounds or geometries that scale whole gradients, got {given!r}. "
            "Pass for example `dpoptax.l2_clip(1.0)` or `dpoptax.automatic_clip(1.0)`."
        )
    return given


def _split_bound(clip: Clip, layers: int) -> Clip:
    """Returns the geometry with bound C/√layers, so that all layers together have C."""
    if not isinstance(clip, BoundedClip):
        raise ValueError(
            f"`clips` must have a sensitivity that can be split over the layers, got {clip!r}. "
            "Pass a tree with one geometry for each layer."
        )
    return dataclasses.replace(clip, l2_clip_norm=clip.l2_clip_norm / math.sqrt(layers))
