"""User-level privacy: an example is a user's bounded set of records, and ε is about a whole user.

A `UserTable` knows the owner of each record and turns the drawn users into rows of records.
`per_user_loss` turns the loss of a record into that of a user. `clipped_grad` clips the gradient of
that loss, so that a user is clipped once, whatever the number of its records.

    indices, mask = sampler.sample(t)              of examples
    sampler = table.sampler(PoissonSampler, batch_size=30, seed=seed)
    drawn = table.sample(sampler, t)               of users, with the records of each
    grad_fn(points, data[indices], mask)           one gradient an example
    grad_fn(points, (data[drawn.records], drawn.records_mask), drawn.mask)     one a user

`table.sampler` makes a sampler of users: its `dataset_size` is the number of users, `batch_size`
the expected number of users in a step, and neighboring data sets differ in one user with all of
its records.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dpoptax._pricing.checks import integer
from dpoptax._tree import PyTree, kind_of
from dpoptax.sampling import Sampler
from dpoptax.tables._trained_rows import TrainedRows

_Sampler = TypeVar("_Sampler", bound=Sampler)

_SAMPLER_OF_USERS = (
    "Make the sampler with table.sampler(PoissonSampler, batch_size=…, seed=…), whose batch_size "
    "counts users."
)
_SELECTED = (
    "rows of a table were selected by the lookups of users. The places of records that a "
    "user does not have hold records of others, which were counted as the user's. Select a "
    "vocabulary once with dpoptax.tables.select_rows, whose lookups are (users, …)"
)


class UserSample(NamedTuple):
    """The users of one step, and the records that each of them gives.

    Attributes:
      users: (padded_size,) int64 in [0, num_users), as the sampler drew them; the `ids` of a loss
        with randomness.
      mask: (padded_size,) bool, True for the users that were drawn.
      records: (padded_size, records_per_user) int64, places in the data set; 0 for padding, so that
        gathering with them is always valid.
      records_mask: (padded_size, records_per_user) bool, True for the records that count.
    """

    users: np.ndarray
    mask: np.ndarray
    records: np.ndarray
    records_mask: np.ndarray


class UserTable:
    """Maps users to their records, and selects the records of a user that take part in a step.

    A user with at most `records_per_user` records gives all of them. From a user with more, each
    step draws that many, uniformly and without replacement. The generator is seeded by the seed,
    the user's label and the step. So no user affects the records of another one, and a restored run
    draws as before.

    Privacy: with `per_user_loss` and `clipped_grad` one user moves the sum by at most C, whatever
    it owns. ε of a sampler of this table is then about one user. It relies on the labels: a person
    with two labels is protected as two. `seed` need not be secret, since the bound holds for any
    selection of records; the sampler's seed must be. `records_per_user` and `num_users` are public;
    the number of records of each user is private, and so is `num_records`.

    Attributes:
      num_users: number of users; the `dataset_size` of its samplers.
      num_records: the number of records in the data set.
      records_per_user: R.

    Args:
      owners: (N,), the owner of each record in the order of the data set: whole numbers from 0, or
        texts that are not empty. A user's number is the place of its label among the sorted labels.
      records_per_user: R, the largest number of records that a user gives to a step. Choose it
        without looking at the data.
      seed: a non-negative integer of any size.

    Raises:
      TypeError: `owners` that are neither integers nor texts, or have no order.
      ValueError: no owners, records with several owners or with none, `records_per_user` below 1, a
        negative seed.

    >>> from dpoptax.sampling import PoissonSampler
    >>> table = UserTable(["ada", "bob", "ada", "ada", "cy"], records_per_user=2, seed=0)
    >>> sampler = table.sampler(PoissonSampler, batch_size=3, seed=1)
    >>> drawn = table.sample(sampler, step=0)
    >>> drawn.records[drawn.records_mask], drawn.records.shape
    (array([1, 4, 0, 3]), (3, 2))
    """

    def __init__(
        self, owners: Sequence[object] | np.ndarray, records_per_user: int, *, seed: int
    ) -> None:
        self._bound(records_per_user, seed)
        self._labels, inverse = np.unique(_checked(owners), return_inverse=True)
        self.num_users, self.num_records = len(self._labels), len(inverse)
        # The records sorted by owner; those of user u are from _starts[u] to _starts[u + 1].
        self._records = np.argsort(inverse, kind="stable")
        counts = np.bincount(inverse, minlength=self.num_users)
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def with_bound(self, records_per_user: int, *, seed: int) -> "UserTable":
        """Returns a table of the same owners with another bound and seed, without sorting again.

        Raises:
          ValueError: `records_per_user` below 1, or a negative seed.
        """
        table = copy.copy(self)
        table._bound(records_per_user, seed)
        return table

    def __repr__(self) -> str:
        """Returns the public numbers only."""
        return f"UserTable(num_users={self.num_users}, records_per_user={self.records_per_user})"

    def records_of(self, user: int) -> np.ndarray:
        """Returns all records of a user, ascending, (number of records,) int64."""
        return self._records[self._starts[user] : self._starts[user + 1]]

    def sampler(self, kind: Callable[..., _Sampler], **options: Any) -> _Sampler:
        """Returns a sampler of this table's users.

        The result knows that it draws users: `dpoptax.accounting.guarantee` is then about one user
        with all of its records. Units: the sampler's `batch_size` counts users.

        Args:
          kind: a class of `dpoptax.sampling`, such as `PoissonSampler`.
          **options: its arguments except `dataset_size` and `unit`.

        Raises:
          ValueError: if the sampler refuses an option.

        >>> from dpoptax.sampling import PoissonSampler
        >>> table = UserTable(["ada", "bob", "ada"], records_per_user=2, seed=0)
        >>> sampler = table.sampler(PoissonSampler, batch_size=1, seed=1)
        >>> sampler.dataset_size, sampler.unit
        (2, 'user')
        """
        return kind(dataset_size=self.num_users, unit="user", **options)

    def sample(self, sampler: Sampler, step: int) -> UserSample:
        """Returns the users that a sampler draws for a step, with the records of each.

        Raises:
          TypeError: `sampler` is not a sampler.
          ValueError: the sampler does not draw this table's users, or it draws a user twice, which
            would move the sum by two clipping bounds.
        """
        if not hasattr(sampler, "dataset_size"):
            raise TypeError(
                f"`sampler` must be a sampler, got {sampler!r}. Call table.sample(sampler, step)."
            )
        if sampler.dataset_size != self.num_users:
            raise ValueError(
                f"`sampler.dataset_size` must be the {self.num_users} users of the table, got "
                f"{sampler.dataset_size}. {_SAMPLER_OF_USERS}"
            )
        if sampler.unit != "user":
            raise ValueError(
                f"`sampler.unit` must be 'user', got {sampler.unit!r}: the guarantee would be "
                f"about one example. {_SAMPLER_OF_USERS}"
            )
        users, mask = sampler.sample(step)
        drawn = users[mask]
        if len(np.unique(drawn)) != len(drawn):
            values, counts = np.unique(drawn, return_counts=True)
            raise ValueError(
                f"User {values[counts > 1][0]} is {counts.max()} times in the batch of step "
                f"{step} and would move the sum by as many clipping bounds. Draw with a sampler of "
                "dpoptax.sampling."
            )
        records = np.zeros((len(users), self.records_per_user), np.int64)
        counts = np.zeros(len(users), np.int64)
        for row in np.flatnonzero(mask):
            chosen = self._chosen(int(users[row]), step)
            counts[row] = len(chosen)
            records[row, : len(chosen)] = chosen
        records_mask = np.arange(self.records_per_user) < counts[:, None]
        return UserSample(users, mask, records, records_mask)

    def describe(self) -> dict[str, object]:
        """Returns the unit of protection as JSON values for a run's record."""
        return {"unit": "user", "records_per_user": self.records_per_user}

    def _bound(self, records_per_user: int, seed: int) -> None:
        remedy = "give the largest number of records of a user in a step"
        self.records_per_user = integer("records_per_user", records_per_user, 1, remedy)
        self._seed = integer("seed", seed, 0, "take one from secrets.randbits(128)")

    def _chosen(self, user: int, step: int) -> np.ndarray:
        owned = self.records_of(user)
        if len(owned) <= self.records_per_user:
            return owned
        # By the label, and not by the user's number, which depends on who else is there. For the
        # same reason places among the user's own records are drawn, and not in the data set.
        text = str(self._labels[user]).encode(errors="surrogatepass")  # such as of a file's name
        label = hashlib.blake2b(text, digest_size=16).digest()
        words = (int(word) for word in np.frombuffer(label, np.uint32))
        rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(*words, step)))
        size = self.records_per_user
        return owned[np.sort(rng.choice(len(owned), size=size, replace=False, shuffle=False))]


def per_user_loss(
    loss_fn: Callable[..., PyTree],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    has_aux: bool = False,
) -> Callable[..., PyTree]:
    """Returns the loss of a user, for `clipped_grad`, from the loss of a record.

        ℓ(x; u) = (1/n) Σ_{k ≤ n} ℓ(x; ξ_k)   or the sum,   ξ_1, …, ξ_n the records under u's mask

    Its gradient is the mean or sum of the records' gradients, taken before the clip: one vector per
    user. Ghost clipping treats the records as positions of one example.

    Privacy: with `clipped_grad` a user moves the sum by at most C. The loss depends only on the
    records under the user's mask. Padding changes nothing, even if it is not finite. A user without
    records is computed with records of zeros: its loss and gradient are exactly zero, and
    `adaptive_clip` counts it as below the threshold. A user with a gradient that is not finite adds
    exactly zero.

    Args:
      loss_fn: `loss_fn(params, record)`, or with a key `loss_fn(params, record, key)`; scalar, or
        (scalar, aux) with `has_aux`.
      reduction: "mean", so that the gradient norm does not depend on the number of records, or
        "sum", so that a user with more records weighs more until it is clipped.
      has_aux: whether `loss_fn` returns auxiliary outputs. They are returned for all rows of a
        user, (R, …); padding has those of the user's first record, or of zeros without records.

    Returns:
      `loss(params, (records, mask))`, or with a third argument `key`, of which each row gets its
      own: leaves of `records` are (R, …), `mask` is (R,) bool.

    Raises:
      ValueError: an unknown `reduction`; at the call, records or a mask of other shapes.
      TypeError: at the call, a mask that is not bool, a `loss_fn` that is not scalar, or a table
        whose rows `dpoptax.tables.selected_grad` selects.

    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = dpoptax.clipped_grad(per_user_loss(loss_fn), dpoptax.l2_clip(1.0))
    >>> records = jnp.array([[[-3.0, -4.0], [-9.0, -12.0]], [[-0.3, -0.4], [5.0, 5.0]]])
    >>> records_mask = jnp.array([[True, True], [True, False]])
    >>> grad_fn(jnp.zeros(2), (records, records_mask)).sum
    Array([0.899..., 1.199...], dtype=float32)
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}.")

    def loss(
        params: PyTree, user: tuple[PyTree, ArrayLike], key: jax.Array | None = None
    ) -> PyTree:
        records, mask = _checked_user(user)
        if any(isinstance(leaf, TrainedRows) for leaf in jax.tree.leaves(params)):
            raise TypeError(_SELECTED)
        # Padding becomes the user's first record. Its weight is zero either way. But padding often
        # holds data of others, and zero times an infinite derivative there would be NaN, so that
        # the user's contribution would depend on them.
        rows = jnp.where(mask, jnp.arange(len(mask)), jnp.argmax(mask))
        own = jax.tree.map(lambda x: jnp.asarray(x)[rows], records)
        # A user without records gets zeros. Otherwise records of others would decide whether its
        # gradient is finite, which a geometry with a statistic of each example counts.
        own = jax.tree.map(lambda x: jnp.where(jnp.any(mask), x, jnp.zeros_like(x)), own)
        if key is None:
            out = jax.vmap(loss_fn, (None, 0))(params, own)
        else:
            out = jax.vmap(loss_fn, (None, 0, 0))(params, own, jax.random.split(key, len(mask)))
        losses, aux = out if has_aux else (out, None)
        if jnp.shape(losses) != mask.shape:
            raise TypeError(
                "`loss_fn` must return a scalar for a record, got an array of shape "
                f"{jnp.shape(losses)[1:]}."
            )
        total = jnp.sum(jnp.where(mask, losses, 0.0))
        if reduction == "mean":
            total = total / jnp.maximum(jnp.sum(mask), 1)
        return (total, aux) if has_aux else total

    return loss


def _checked(owners: Sequence[object] | np.ndarray) -> np.ndarray:
    """Returns the owners as an array of numbers or of texts, one for each record."""
    if not isinstance(owners, Iterable) or isinstance(owners, str | Mapping | Set):
        raise TypeError(
            f"`owners` must be a list or an array, got {kind_of(owners)}. Pass the owner of each "
            "record, in the order of the data set."
        )
    if isinstance(owners, np.ma.MaskedArray) and np.ma.is_masked(owners):
        nobody = np.flatnonzero(owners.mask)[0]
        raise ValueError(
            f"`owners` must not be masked, got a mask at {nobody}. Leave out records "
            "without an owner."
        )
    array = isinstance(owners, np.ndarray | jax.Array)
    # As objects, since NumPy would turn missing entries among texts into the text "nan".
    labels = np.asarray(owners) if array else np.array(list(owners), object)
    plural = [n for n, label in enumerate(labels) if isinstance(label, list | tuple | set)]
    if labels.ndim != 1 or plural:
        raise ValueError(
            "`owners` must have one owner for each record, shape (N,), got shape "
            f"{labels.shape}{f' and several at {plural[0]}' if plural else ''}. A record of "
            "several users would be in the contribution of each, but ε is for one. Assign it to "
            "one of them, or leave it out."
        )
    if not len(labels):
        raise ValueError("`owners` must not be empty. Pass the owner of each record.")
    if labels.dtype == object:
        texts = isinstance(labels[0], str)
        for place, label in enumerate(labels):
            fits = isinstance(label, str if texts else int | np.integer)
            if not fits or isinstance(label, bool):
                raise TypeError(
                    "`owners` must be only integers of at least 0, or only strings, got "
                    f"owners[{place}]={label!r}. Leave out records without an owner."
                )
            if texts and label.endswith("\0"):  # NumPy would take it for the label without
                raise ValueError(f"`owners` must not end in NUL, got owners[{place}]={label!r}.")
        try:
            labels = labels.astype(str if texts else np.int64)
        except OverflowError:
            raise ValueError(
                "`owners` must fit into 63 bits. Pass larger numbers as strings."
            ) from None
    if labels.dtype.kind not in "iuU":
        raise TypeError(f"`owners` must be integers of at least 0, or strings, got {labels.dtype}.")
    nobody = np.flatnonzero(labels == "" if labels.dtype.kind == "U" else labels < 0)
    if len(nobody):
        raise ValueError(
            "`owners` must be integers of at least 0, or strings that are not empty, got "
            f"owners[{nobody[0]}]={labels[nobody[0]].item()!r}. Several people under one label are "
            "protected as one. Leave out records without an owner."
        )
    return labels


def _checked_user(user: tuple[PyTree, ArrayLike]) -> tuple[PyTree, jax.Array]:
    """Returns the records and the mask of one user after checks."""
    if not isinstance(user, tuple) or len(user) != 2:
        raise ValueError(f"A user must be a pair (records, mask), got {kind_of(user)}.")
    records, mask = user[0], jnp.asarray(user[1])
    if mask.ndim != 1:
        raise ValueError(
            f"A user's mask must have shape (R,), one entry for each record, got {mask.shape}."
        )
    if mask.dtype != bool:
        raise TypeError(
            f"A user's mask must be bool, got {mask.dtype}. It is the second of the pair (records, "
            "mask), and True for the user's records."
        )
    for leaf in jax.tree.leaves(records):
        if jnp.shape(leaf)[:1] != mask.shape:
            raise ValueError(
                f"A user's records must have shape ({len(mask)}, …), one row for each entry of the "
                f"mask, got {jnp.shape(leaf)}."
            )
    return records, mask
