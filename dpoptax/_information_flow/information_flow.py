"""Finds the results of a step that may be shown, and the private or secret ones."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._ghost_clipping.explain import format_table
from dpoptax._information_flow.entry_facts import DISTINCT_FACTS
from dpoptax._information_flow.example_axes import LEADING_AXIS
from dpoptax._information_flow.label_follower import LARGE_SIZE, LabelFollower, typed_label
from dpoptax._information_flow.labels import Content, Label, shown_kind
from dpoptax._information_flow.source_lines import source_of_result
from dpoptax._support.serialization import key_to_data
from dpoptax._support.tree import PyTree, nnx_kinds


@dataclasses.dataclass(frozen=True)
class Shown:
    """Describes one array that a function returns, or passes to Python while it runs.

    Attributes:
      path: its place in the result, such as `[1][0].count`; the name of the callback; or
        `jax.Ref` if the function writes to one.
      kind: one of four.

        - "public": it depends on no private data and on no secret.
        - "released": it depends on private data through noise stages only.
        - "secret": it is part of the returned state of a noise stage, and depends on a noise key,
          on drawn noise, or on another secret.
        - "private": it must not be shown. Private data reaches it around the noise, or a secret
          is in a place other than the state of a noise stage.
      type: shape and dtype, such as `float32[8]`.
      where: the line that computed it; empty for an argument that is returned unchanged.
      because: for "private", the first line, with its code, where private data left the path to the
        release. It is `where` if no operation combined several examples.
    """

    path: str
    kind: str
    type: str
    where: str
    because: str = ""


@dataclasses.dataclass(frozen=True)
class InformationFlow:
    """Lists everything a step shows, and prints private and secret results.

    Attributes:
      shown: every array that the function returns or passes to Python.
      closed_over: types of the arrays, of 100 numbers or more, that the function closes over
        instead of taking them as arguments. They are treated as public.
      joined: the operations, with their lines, that combined several examples in one row before the
        clip, or may have. No clip then bounds the contribution of one example.
      redrawn: the lines that may draw noise by a key that draws noise elsewhere. Examples are two
        calls of `update` with one state, each turn of a loop, or each device of a `jax.shard_map`.
        The difference of two such releases has no noise.
      clamped: for each line that gathers private rows by secret indices, the number of rows that
        it clamps the indices to. It must be the N of the sampler. With fewer rows, the last one
        would fill the places of the missing ones. `PrivateRun.batches` checks the number.
    """

    shown: tuple[Shown, ...]
    closed_over: tuple[str, ...]
    joined: tuple[str, ...]
    redrawn: tuple[str, ...]
    clamped: tuple[str, ...]

    @property
    def private(self) -> tuple[Shown, ...]:
        """The results that must not be shown; empty for a step that may be published.

        They depend on private data around the noise, or on a secret (a key, the indices or the
        mask of a batch) without being part of the state of a noise stage.
        """
        return tuple(each for each in self.shown if each.kind == "private")

    @property
    def secret(self) -> tuple[Shown, ...]:
        """The secret parts of the states of noise stages, such as the noise key.

        Store and protect such a state like the data: the key allows anyone to subtract the noise.
        """
        return tuple(each for each in self.shown if each.kind == "secret")

    def __str__(self) -> str:
        rows = [("private", *row) for row in _folded(self.private)]
        rows += [("secret", s.path, s.type, s.where) for s in self.secret]
        for rest in ("released", "public"):
            number = sum(each.kind == rest for each in self.shown)
            rows += [(rest, f"{number} more", "", "")] if number else []
        table = format_table([("kind", "result", "type", "because of"), *rows])
        if self.joined:
            table += f"\nexamples are joined in front of a clip: {', '.join(self.joined)}"
        if self.redrawn:
            table += f"\nnoise may be drawn a second time: {', '.join(self.redrawn)}"
        if self.clamped:
            table += f"\nindices are clamped to N rows, check N: {', '.join(self.clamped)}"
        if self.closed_over:
            table += f"\nclosed over, taken for public: {', '.join(self.closed_over)}"
        return table


def information_flow(
    fn: Callable[..., Any],
    *args: PyTree,
    private_argnums: int | Sequence[int],
    secret_argnums: int | Sequence[int] = (),
) -> InformationFlow:
    """Finds results of a step that depend on private data or secrets without noise.

    `fn` is traced and not run. A value is private if one of its operands is. The branches of a
    `cond` and the rounds of a `while_loop` depend on their conditions. A clipped sum becomes a
    release in a noise stage of this package (`gaussian_noise`, `correlated_noise`, …) that adds
    noise and has a guarantee. It stays private with `noise_multiplier=0` or `geodp`.

    A clip bounds the contribution of one row of a batch. This is the contribution of one example
    only if each row belongs to one example, so rows are followed as well. An operation may combine
    rows before they reach `clipped_grad` or `clip_per_example`, for example by standardizing a
    batch with its mean. The results then stay private after the noise, and `joined` names the
    operation.

    Secrets are the noise key, the noise that `correlated_noise` keeps, and the arguments named by
    `secret_argnums`. Only the state of a noise stage may hold them. Anywhere else a secret counts
    as private: the sum of a sampler's mask is the realized batch size.

    So one assertion is enough. If `private` is empty, all results except the states of the noise
    stages may be shown: they contain no loss, no gradient norm, no batch size and no index of a
    batch, and no `jax.debug.print` prints one.

    Privacy: this is a statement about `fn`, for every input. `dpoptax.accounting.guarantee`
    gives the ε of the releases. Time, memory, and Python outside of `fn` are not covered, nor are
    objects that `fn` writes to, arrays that it closes over (`closed_over`), and private arguments
    that are not named. A host function (`pure_callback`) sees the values that it is called with.
    Writing to a `jax.Ref` counts as showing.

    Args:
      fn: the step, with or without `jax.jit`; or any other function of arrays.
      *args: its arguments, or trees of `jax.ShapeDtypeStruct` of the same structure.
      private_argnums: positions of the private arguments, usually batch and mask. Row i of all of
        them, along their leading axes, belongs to the same example.
      secret_argnums: positions of the arguments that are secret and do not depend on the data.
        Examples are a sampler's indices and mask, if `fn` gathers the batch from the whole data
        set. Row i of the gathered batch counts as one example, so no index may occur twice.

    Returns:
      An `InformationFlow`.

    Raises:
      TypeError: an argument is or contains an object of flax.nnx.
      ValueError: a position is not that of an argument.

    >>> import dpoptax, jax.numpy as jnp, optax
    >>> tx = optax.chain(
    ...     dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=jax.random.key(0)),
    ...     optax.sgd(0.1),
    ... )
    >>> loss_fn = lambda params, example: jnp.sum((params - example) ** 2)
    >>> grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    >>> def step(params, opt_state, batch, mask):
    ...     grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     return params, opt_state, jnp.mean(batch)
    >>> params, batch, mask = jnp.zeros(2), jnp.ones((8, 2)), jnp.ones(8, bool)
    >>> flow = information_flow(step, params, tx.init(params), batch, mask, private_argnums=(2, 3))
    >>> [(each.path, each.type) for each in flow.private]
    [('[2]', 'float32[]')]
    """
    argument_content = [Content.NOTHING] * len(args)
    for name, given_numbers, holds in (
        ("private_argnums", private_argnums, Content.PRIVATE),
        ("secret_argnums", secret_argnums, Content.SECRET),
    ):
        for number in (given_numbers,) if isinstance(given_numbers, int) else given_numbers:
            if number not in range(len(args)):
                raise ValueError(
                    f"`{name}` must number arguments from 0, below their count of {len(args)}, got "
                    f"{given_numbers}."
                )
            argument_content[number] |= holds
    _check_pure(args)
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    closed_over = zip(traced.jaxpr.constvars, traced.consts, strict=True)
    few = {var: x for var, x in closed_over if getattr(var.aval, "size", LARGE_SIZE) < LARGE_SIZE}
    follower = LabelFollower({var: np.asarray(key_to_data(x)).tobytes() for var, x in few.items()})
    given = [
        label
        for number, (arg, holds) in enumerate(zip(args, argument_content, strict=True))
        for label in _labels(arg, functools.partial(follower.number, "argument", number), holds)
    ]
    results = follower.follow(traced.jaxpr, list(map(typed_label, given, traced.jaxpr.invars)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]

    def shown_as(path: str, label: Label, of: bool, kind_of: str, where: str) -> Shown:
        kind = shown_kind(label.holds, of)
        because = (label.left or label.joined or where) if kind == "private" else ""
        return Shown(path, kind, kind_of, where, because)

    shown = [
        shown_as(path, label, bool(of), var.aval.str_short(), source_of_result(traced.jaxpr, var))
        for path, label, var, of in zip(
            paths, results, traced.jaxpr.outvars, _stage_fields(shapes), strict=True
        )
    ]
    seen = [shown_as(name, label, False, "", line) for (name, line), label in follower.seen.items()]
    found = follower.closed_over, follower.joined, follower.redrawn, follower.clamped
    return InformationFlow((*shown, *seen), *map(tuple, found))


def _folded(private: Sequence[Shown]) -> list[tuple[str, str, str]]:
    """Returns a row of the table for each cause: the first result and the number of others."""
    found: dict[str, list[Shown]] = {}
    for each in private:
        found.setdefault(each.because, []).append(each)
    return [
        (first.path + (f" and {len(rest)} more" if rest else ""), first.type, because)
        for because, (first, *rest) in found.items()
    ]


def _labels(arg: PyTree, numbered: Callable[..., int], holds: Content) -> list[Label]:
    """Returns the labels of an argument's leaves, with secrets of noise stages."""
    labels = []
    for place, (leaf, fields) in enumerate(
        zip(jax.tree.leaves(arg), _stage_fields(arg), strict=True)
    ):
        # Only the step count and the imprint in the state of a noise stage are not secret.
        content = holds | Content.SECRET if fields - {"count", "imprint"} else holds
        if Content.PRIVATE in content:
            # A private scalar has no rows, and may depend on all examples.
            labels.append(Label(content, LEADING_AXIS if jnp.ndim(leaf) else None))
        else:
            labels.append(
                Label(content, number=numbered(place, jnp.shape(leaf)), entries=DISTINCT_FACTS)
            )
    return labels


def _stage_fields(tree: PyTree) -> list[set[Any]]:
    """Returns the fields of noise stages' states that contain each leaf.

    A noise stage's state is recognized by its imprint, even if flax.nnx has converted it to a
    dictionary.
    """
    paths = [
        [getattr(k, "name", getattr(k, "key", k)) for k in path]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    # The path of a state ends before its field `imprint`. Leaves below it belong to the state.
    stages = {tuple(path[: path.index("imprint")]) for path in paths if "imprint" in path}
    return [{path[n] for n in range(len(path)) if tuple(path[:n]) in stages} for path in paths]


def _check_pure(args: PyTree) -> None:
    """Raises if arguments are flax.nnx objects, whose values a function may write to."""

    def is_object(x: object) -> bool:
        return not nnx_kinds(x).isdisjoint({"Pytree", "Variable"})

    found = [x for x in jax.tree.leaves(args, is_leaf=is_object) if is_object(x)]
    if found:
        raise TypeError(
            f"Arguments must not contain flax.nnx objects, got a {type(found[0]).__name__}. `fn` "
            "could write to it without returning it. Write `graph, states = nnx.split((model, "
            "optimizer))`, and pass a function of `nnx.as_pure(states)` that calls `model, "
            "optimizer = nnx.merge(graph, states)` and the step, and returns "
            "`nnx.as_pure(nnx.state((model, optimizer)))`."
        )
