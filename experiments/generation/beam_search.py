"""Implements beam search for a decoder, compiled with one shape for all lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""`step(tokens, past, count)` takes token number `count`, counted from 0, of each beam, (beams,).
It returns the logits of the next tokens, (beams, vocabulary), and `past` including these tokens."""


class _Search(NamedTuple):
    """The state of a search after `taken` tokens; token rows are padded with the end."""

    taken: jax.Array
    alive: jax.Array  # (beams, max_tokens), not ended
    sums: jax.Array  # (beams,), their log-probabilities
    logits: jax.Array  # (beams, vocabulary), of their next tokens
    past: Any
    ended: jax.Array  # (beams, max_tokens)
    scores: jax.Array  # (beams,), of `ended`; -inf for empty rows
    done: jax.Array


def beam_search(
    step: Step,
    logits: jax.Array,
    past: Any,
    *,
    end: int,
    beams: int,
    length_penalty: float,
    max_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best continuation found and its score.

    The score is log-probability / tokens**length_penalty, and the end counts as a token.

    Each step takes the best 2·beams continuations of the beams. Those that end and are among the
    best `beams` are set aside, and the best `beams` others continue. The search stops when `beams`
    continuations have ended and none of the others has a better score so far. After `max_tokens` it
    also stops, and unfinished continuations count. One beam is greedy search.

    Args:
        step: Computes the next logits; see `Step`.
        logits: (vocabulary,), of the first token.
        past: State of `step` after the prompt, for one beam. Each leaf gets a leading axis of
            beams.
        end: Token that ends a text.
        beams: Number of continuations that are followed.
        length_penalty: 0 prefers the most probable text; larger values prefer longer texts.
        max_tokens: Maximum number of tokens.

    Returns:
        Tokens (max_tokens,), padded with the end, and their score.

    Source: the search of the `transformers` library, which Li et al. (2021) use.
    """

    def repeat(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (beams, *x.shape))

    def more(search: _Search) -> jax.Array:
        return (search.taken < max_tokens) & ~search.done

    def advance(search: _Search) -> _Search:
        probabilities = jax.nn.log_softmax(search.logits.astype(jnp.float32))
        vocabulary = probabilities.shape[-1]
        continued = (search.sums[:, None] + probabilities).reshape(-1)
        sums, which = jax.lax.top_k(continued, 2 * beams)
        origin, tokens = which // vocabulary, which % vocabulary
        rows = search.alive[origin].at[:, search.taken].set(tokens)
        count = search.taken + 1
        size = count.astype(jnp.float32) ** length_penalty

        ends = tokens == end
        scores = jnp.where(ends & (jnp.arange(2 * beams) < beams), sums / size, -jnp.inf)
        scores, best = jax.lax.top_k(jnp.concatenate([search.scores, scores]), beams)
        ended = jnp.concatenate([search.ended, rows])[best]

        sums, going = jax.lax.top_k(jnp.where(ends, -jnp.inf, sums), beams)
        past = jax.tree.map(lambda x: x[origin[going]], search.past)
        logits, past = step(tokens[going], past, search.taken)
        done = jnp.min(scores) >= jnp.max(sums) / size
        return _Search(count, rows[going], sums, logits, past, ended, scores, done)

    nothing = jnp.full((beams, max_tokens), end, jnp.int32)
    search = jax.lax.while_loop(
        more,
        advance,
        _Search(
            taken=jnp.array(0),
            alive=nothing,
            sums=jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf),
            logits=repeat(logits),
            past=jax.tree.map(repeat, past),
            ended=nothing,
            scores=jnp.full((beams,), -jnp.inf),
            done=jnp.array(False),
        ),
    )
    unfinished = jnp.where(search.done, -jnp.inf, search.sums / max_tokens**length_penalty)
    scores = jnp.concatenate([search.scores, unfinished])
    best = jnp.argmax(scores)
    return jnp.concatenate([search.ended, search.alive])[best], scores[best]
