"""User-level privacy: each example is a bounded set of records of one user.

A `UserTable` stores the owner of each record, and turns drawn users into rows of records.
`per_user_loss` turns the loss of a record into the loss of a user. `clipped_grad` clips the
gradient of that loss, so each user is clipped once, for any number of records.

    # examples
    indices, mask = sampler.sample(t)
    grad_fn(points, data[indices], mask)  # one gradient per example
    # users
    sampler = table.sampler(PoissonSampler, batch_size=30, seed=seed)
    drawn = table.sample(sampler, t)
    grad_fn(points, (data[drawn.records], drawn.records_mask), drawn.mask)  # one per user

`table.sampler` returns a sampler of users. Its `dataset_size` is the number of users, and its
`batch_size` is the expected number of users in a step. Neighboring data sets differ in one user
with all of its records.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dpoptax._support.argument_checks import integer, seed_integer
from dpoptax._support.tree import PyTree, kind_of
from dpoptax.sampling import Sampler

__all__ = ["UserSample", "UserTable", "per_user_loss"]


def __dir__() -> list[str]:
    return __all__


_Sampler = TypeVar("_Sampler", bound=Sampler)


class UserSample(NamedTuple):
    """Users of one step, with their records.

    Attributes:
      users: (padded_size,) int64 in [0, num_users), as drawn by the sampler. Pass them as `ids` for
        a loss with randomness.
      mask: (padded_size,) bool, True for the users that were drawn.
      records: (padded_size, records_per_user) int64, indices of records in the data set. Padding is
        0, so all entries are valid indices.
      records_mask: (padded_size, records_per_user) bool, True for the records of the user.
    """

    users: np.ndarray
    mask: np.ndarray
    records: np.ndarray
    records_mask: np.ndarray


class UserTable:
    """Maps users to their records, and selects the records that take part in a step.

    A user with at most `records_per_user` records contributes all of them. If a user has more, each
    step draws that many, uniformly without replacement. The generator is seeded with the seed, the
    user's label and the step. So no user affects the records of another, and a restored run repeats
    its draws.

    Privacy: with `per_user_loss` and `clipped_grad` one user changes the sum by at most C, for any
    records. ε of a sampler of this table is then about one user. It relies on the labels: a person
    with two labels is protected as two users. `seed` need not be secret, since the bound holds for
    any selection of records. The seed of the sampler must be secret. `records_per_user` and
    `num_users` are public; the number of records of each user and `num_records` are private.

    Attributes:
      num_users: number of users; the `dataset_size` of its samplers.
      num_records: the number of records in the data set.
      records_per_user: R.
      owners: a hash of the owner of each record, the same in every process. Equal assignments have
        equal hashes, whatever the labels are. It is computed from private data: do not publish it.

    Args:
      owners: (N,), the owner of each record in the order of the data set: nonnegative integers or
        nonempty strings. A user's number is the place of its label among the sorted labels.
      records_per_user: R, the largest number of records that a user contributes to a step. Choose
        it without looking at the data.
      seed: a non-negative integer of any size.

    Raises:
      TypeError: `owners` are neither integers nor strings, or are not ordered.
      ValueError: `owners` is empty, a record has several owners or none, `records_per_user` is
        below 1, or `seed` is negative.

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
        remedy = "give the largest number of records of a user in a step"
        self.records_per_user = integer("records_per_user", records_per_user, 1, remedy)
        self._seed = seed_integer(seed)
        self._labels, inverse = np.unique(_checked(owners), return_inverse=True)
        self.num_users, self.num_records = len(self._labels), len(inverse)
        # Records sorted by owner. Those of user u are in _starts[u] : _starts[u + 1].
        self._records = np.argsort(inverse, kind="stable")
        counts = np.bincount(inverse, minlength=self.num_users)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        # The hash numbers users by their first record, so that labels do not matter.
        order = np.argsort(np.argsort(self._records[self._starts[:-1]]))
        self.owners = hashlib.sha256(order[inverse].astype("<i8").tobytes()).hexdigest()

    def __repr__(self) -> str:
        """Returns the public numbers only."""
        return f"UserTable(num_users={self.num_users}, records_per_user={self.records_per_user})"

    def sampler(self, kind: Callable[..., _Sampler], **options: Any) -> _Sampler:
        """Returns a sampler of this table's users.

        Its unit is "user", so `dpoptax.accounting.guarantee` is about one user with all of its
        records, and its `batch_size` counts users.

        Args:
          kind: a class of `dpoptax.sampling`, such as `PoissonSampler`.
          **options: its arguments except `dataset_size`, `unit` and `owners`.

        Raises:
          ValueError: the sampler rejects an option.

        >>> from dpoptax.sampling import PoissonSampler
        >>> table = UserTable(["ada", "bob", "ada"], records_per_user=2, seed=0)
        >>> sampler = table.sampler(PoissonSampler, batch_size=1, seed=1)
        >>> sampler.dataset_size, sampler.unit
        (2, 'user')
        """
        return kind(dataset_size=self.num_users, unit="user", owners=self.owners, **options)

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
        if (sampler.dataset_size, sampler.owners) != (self.num_users, self.owners):
            raise ValueError(
                f"`sampler` must draw the {self.num_users} users of this table, got one of "
                f"{sampler.dataset_size} {sampler.unit}s, of other owners of the records or of "
                "unknown ones. Make it with table.sampler(PoissonSampler, batch_size=…, seed=…), "
                "whose batch_size counts users."
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
        starts = self._starts[drawn, None]
        places, owned = self._places(drawn, step), self._starts[drawn + 1, None] - starts
        records = np.zeros((len(users), self.records_per_user), np.int64)
        records_mask = np.zeros(records.shape, bool)
        records_mask[mask] = own = places < owned
        records[mask] = np.where(own, self._records[np.where(own, starts + places, 0)], 0)
        return UserSample(users, mask, records, records_mask)

    def _shares(self, total: int) -> np.ndarray:
        """Returns an integer for each record: nearly equal shares of `total` for each user."""
        owned = np.diff(self._starts)
        place = np.arange(self.num_records) - np.repeat(self._starts[:-1], owned)
        count, shares = np.repeat(owned, owned), np.empty(self.num_records, np.int64)
        shares[self._records] = (place + 1) * total // count - place * total // count
        return shares

    def _places(self, users: np.ndarray, step: int) -> np.ndarray:
        """Returns ascending places among each user's records, (users, R)."""
        size = self.records_per_user
        places = np.tile(np.arange(size), (len(users), 1))
        owned = self._starts[users + 1] - self._starts[users]
        for row in np.flatnonzero(owned > size):
            # Seeded with the label, since a user's number depends on the other users. For the same
            # reason, places among the user's own records are drawn, not places in the data set.
            text = str(self._labels[users[row]])
            encoded = text.encode(errors="surrogatepass")  # file names may need it
            label = hashlib.blake2b(encoded, digest_size=16).digest()
            key = (*map(int, np.frombuffer(label, np.uint32)), step)
            rng = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key))
            places[row] = rng.choice(owned[row], size=size, replace=False, shuffle=False)
        return np.sort(places, axis=1)


def per_user_loss(
    loss_fn: Callable[..., PyTree],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    has_aux: bool = False,
) -> Callable[..., PyTree]:
    """Turns the loss of a record into the loss of a user, for `clipped_grad`.

        ℓ(x; u) = (1/n) Σ_{k ≤ n} ℓ(x; ξ_k)   or the sum,   ξ_1, …, ξ_n the records of user u

    Its gradient is the mean or sum of the records' gradients, taken before the clip: one vector per
    user. Ghost clipping treats the records as positions of one example.

    Privacy: with `clipped_grad` a user changes the sum by at most C. The loss depends only on the
    records under the user's mask. Padding has no effect, even if it is not finite. A user without
    records is computed with records of zeros: its loss and gradient are exactly zero, and
    `adaptive_clip` counts it as below the threshold. A user with a gradient that is not finite adds
    exactly zero.

    Args:
      loss_fn: `loss_fn(params, record)`, or with a key `loss_fn(params, record, key)`; scalar, or
        (scalar, aux) with `has_aux`.
      reduction: "mean" or "sum". With "mean", the gradient norm does not depend on the number of
        records. With "sum", a user with more records has a larger weight until it is clipped.
      has_aux: whether `loss_fn` returns auxiliary outputs. They are returned for all rows of a
        user, (R, …). Padding has the outputs of the user's first record, or of zeros if there is
        none.

    Returns:
      `loss(params, (records, mask))`, optionally with a third argument `key`, which is split over
      the rows. The leaves of `records` are (R, …), and `mask` is (R,) bool.

    Raises:
      ValueError: `reduction` is unknown. At the call: records or mask have other shapes.
      TypeError: at the call, the mask is not bool, or `loss_fn` does not return a scalar.

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
        # Padding is replaced by the user's first record, with weight zero. Padding often holds data
        # of others. Zero times an infinite derivative there would be NaN, so the user's
        # contribution would depend on others.
        rows = jnp.where(mask, jnp.arange(len(mask)), jnp.argmax(mask))
        own = jax.tree.map(lambda x: jnp.asarray(x)[rows], records)
        # A user without records gets zeros. Otherwise records of others would determine whether its
        # gradient is finite, which clips with a statistic of each example count.
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
    """Returns the owners as an array of integers or strings, one for each record."""
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
    # Objects, since NumPy would turn missing entries among strings into the string "nan".
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
            if texts and label.endswith("\0"):  # NumPy strips trailing NULs
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
