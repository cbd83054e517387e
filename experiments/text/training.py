"""Trains a head, and LoRA below it, on frozen features, with and without privacy."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.users import UserTable
from experiments.text.encoder import LastProjection
from experiments.transfer import training
from experiments.transfer.training import Columns, Logits, Params, Trained, classify

_PART = 256  # texts whose gradients are computed at once


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Training and held-out texts as features.

    Attributes:
        train: Columns of the training texts: "inputs" and "labels", and for LoRA "sums" and "used".
        owners: The owner of each training text.
        test: Columns of the held-out texts.
        classes: Number of classes.
        encoder: The projection that LoRA corrects. None: inputs are the encoder's output.
        frozen: The published weights of the encoder.
    """

    train: Columns
    owners: np.ndarray
    test: Columns
    classes: int
    encoder: LastProjection | None = None
    frozen: Any = None

    @property
    def width(self) -> int:
        """The width of the last projection's outputs, for LoRA."""
        return int(self.train["sums"].shape[-1])

    @property
    def directions(self) -> int:
        """The number of directions of the last projection's inputs, for LoRA."""
        return int(self.train["inputs"].shape[-1])

    def holding_out(self, share: float) -> "Problem":
        """Returns the problem with a share of the owners as held-out texts."""
        names = np.unique(self.owners)
        drawn = np.random.default_rng(0).permutation(names)[: round(share * len(names))]
        return self._split(np.isin(self.owners, drawn))

    def subset(self, count: int) -> "Problem":
        """Returns the problem with `count` random owners; the held-out texts stay."""
        names = np.unique(self.owners)
        drawn = np.random.default_rng(1).permutation(names)[:count]
        return dataclasses.replace(self._split(~np.isin(self.owners, drawn)), test=self.test)

    def _split(self, out: np.ndarray) -> "Problem":
        train = {name: column[~out] for name, column in self.train.items()}
        test = {name: column[out] for name, column in self.train.items()}
        return dataclasses.replace(self, train=train, owners=self.owners[~out], test=test)

    @property
    def logits(self) -> Logits:
        """The model: the head, after the encoder if there is one."""

        def logits(params: Params, example: Mapping[str, Any], frozen: Any) -> jax.Array:
            hidden = jnp.asarray(example["inputs"], jnp.float32)
            if self.encoder is not None:
                variables = {"params": params["lora"], "frozen": frozen}
                given = hidden, example["sums"], example["used"]
                hidden = jnp.asarray(self.encoder.apply(variables, *given))
            return classify(params["head"], hidden)

        return logits

    def accuracy(self, params: Params) -> float:
        """Returns the share of held-out texts that are classified correctly, in percent."""
        return training.accuracy(self.logits, params, self.test, self.frozen)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Attributes:
        steps: T.
        batch: B, the expected owners in a step.
        rate: Learning rate of the head, for Adam with cosine decay.
        clip: C of the head.
        lora_rate: Learning rate of LoRA's factors.
        lora_clip: C of LoRA's factors.
    """

    steps: int
    batch: int
    rate: float
    clip: float = 1.0
    lora_rate: float = 0.0
    lora_clip: float = 1.0


def train(
    problem: Problem,
    settings: Settings,
    start: Params,
    *,
    seed: int,
    epsilon: float | None,
    also: Any = (),
) -> Trained:
    """Trains with Adam, on one random text of each drawn owner.

    Args:
        problem: The texts.
        settings: The settings.
        start: Initial parameters: "head", and "lora" if the problem has an encoder.
        seed: Seed of batches and noise.
        epsilon: ε of this run and of `also`; None for training without privacy.
        also: Guarantees of other releases of the same texts.
    """
    users = UserTable(problem.owners, records_per_user=1, seed=seed)
    plan = training.make_plan(
        lambda kind: users.sampler(kind, batch_size=settings.batch), settings.steps, epsilon, also
    )
    rates, bounds, part = {"head": settings.rate}, {"head": settings.clip}, None
    if problem.encoder is not None:
        rates["lora"], bounds["lora"] = settings.lora_rate, settings.lora_clip
        part = min(_PART, settings.batch)
    adams = {
        name: optax.adam(optax.cosine_decay_schedule(rate, settings.steps))
        for name, rate in rates.items()
    }
    return training.train(
        problem.logits,
        start,
        problem.train,
        plan,
        seed=seed,
        frozen=problem.frozen,
        users=users,
        optimizer=optax.partition(adams, {name: name for name in start}),
        clip=dpoptax.per_layer_clip(bounds),
        microbatch_size=part,
    )
