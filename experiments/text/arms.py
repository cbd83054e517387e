"""Ways to train: a head alone, or a head and then LoRA on the last projection below it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.text.encoder import LastProjection
from experiments.text.training import Problem, Settings, train
from experiments.transfer.training import Params, Trained, new_classifier

FROZEN_RANK = 32
TRAINED_RANK = 8

Start = tuple[Problem, Params]
Chosen = Mapping[str, Mapping[str, float]]
"""Tuned settings, by the arm that they were tuned for."""


class Problems(NamedTuple):
    """A data set as features: pooled ones, and those below the last projection."""

    head: Problem
    lora: Problem

    def holding_out(self, share: float) -> "Problems":
        """Returns the problems with a share of the owners as held-out texts."""
        return Problems(*(problem.holding_out(share) for problem in self))

    def subset(self, share: float) -> "Problems":
        """Returns the problems with a share of the owners; the held-out texts stay."""
        count = round(share * self.owners)
        return self if share == 1 else Problems(*(problem.subset(count) for problem in self))

    @property
    def owners(self) -> int:
        """The number of owners of training texts."""
        return len(np.unique(self.head.owners))


def frozen_a(problem: Problem, key: jax.Array) -> Start:
    """Returns a problem whose A is the first directions of the inputs, and B = 0."""
    del key
    rank = min(FROZEN_RANK, problem.directions)
    seen, held_out = (
        {**columns, "inputs": columns["inputs"][..., :rank]}
        for columns in (problem.train, problem.test)
    )
    encoder = LastProjection(rank, frozen_a=True, width=problem.width)
    start = {"lora_b": jnp.zeros((rank, problem.width))}
    return dataclasses.replace(problem, encoder=encoder, train=seen, test=held_out), start


def trained_a(problem: Problem, key: jax.Array) -> Start:
    """Returns a problem whose A acts on all directions, a random orthonormal A, and B = 0."""
    rank = min(TRAINED_RANK, problem.directions)
    a = jnp.linalg.qr(jax.random.normal(key, (problem.directions, rank)))[0]
    encoder = LastProjection(rank, width=problem.width)
    factors = {"lora_a": a, "lora_b": jnp.zeros((rank, problem.width))}
    return dataclasses.replace(problem, encoder=encoder), factors


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        title: Its name in tables.
        start: Returns the problem and the first factors of LoRA. None: only the head is trained.
    """

    title: str
    start: Callable[[Problem, jax.Array], Start] | None = None


ARMS = {
    "head": Arm("head"),
    "lora": Arm("LoRA, frozen A", frozen_a),
    "lora-trained-a": Arm("LoRA, A and B", trained_a),
}
"""The ways to train. Each but the first trains the head first, with a share of ε."""


def head_share(epsilon: float) -> float:
    """Returns the ε of the head as a share of the whole ε, if LoRA follows."""
    return 0.8 if epsilon < 2 else 0.5


def train_arm(
    problems: Problems, name: str, chosen: Chosen, epsilon: float | None, *, seed: int
) -> tuple[Problem, Trained]:
    """Trains an arm, and returns the problem that it was trained on.

    One guarantee covers the head and LoRA.

    Args:
        problems: The texts.
        name: The arm.
        chosen: Tuned settings of the head, and of the arm.
        epsilon: ε; None trains without privacy.
        seed: Seed of batches, noise and start.
    """
    arm = ARMS[name]
    head = head_settings(problems.owners, chosen["head"])
    if arm.start is None:
        return problems.head, _train_head(problems.head, head, epsilon, seed)
    share = None if epsilon is None else head_share(epsilon) * epsilon
    first = _train_head(problems.head, head, share, seed)
    settings = lora_settings(problems.owners, chosen[name])
    problem, factors = arm.start(problems.lora, jax.random.key(seed))
    start = {"head": first.params["head"], "lora": factors}
    also = () if first.guarantee is None else (first.guarantee,)
    seed = 2 * seed + 1
    return problem, train(problem, settings, start, seed=seed, epsilon=epsilon, also=also)


def head_settings(owners: int, tuned: Mapping[str, float]) -> Settings:
    """Returns the settings of the steps that train only the head."""
    fixed: dict[str, Any] = {"steps": 100, "batch": owners // 4, "clip": 0.3}
    return Settings(**{**fixed, **tuned})


def lora_settings(owners: int, tuned: Mapping[str, float]) -> Settings:
    """Returns the settings of the steps that train head and LoRA."""
    fixed: dict[str, Any] = {"steps": 40, "batch": min(512, owners // 4)}
    return Settings(**{**fixed, "clip": 0.3, "lora_clip": 0.3, **tuned})


# The arms with LoRA begin with the same heads.
@functools.lru_cache(maxsize=64)
def _train_head(problem: Problem, settings: Settings, epsilon: float | None, seed: int) -> Trained:
    start = {"head": new_classifier(problem.train["inputs"].shape[1], problem.classes)}
    return train(problem, settings, start, seed=2 * seed, epsilon=epsilon)
