"""Beam search over what a decoder may say next, compiled, with one shape for all lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Step = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""`step(tokens, past, count)`: of each beam the logits (beams, vocabulary) of what follows its
token number `count`, from 0, given in `tokens` (beams,), and `past` with that token in it."""


class _Search(NamedTuple):
    """Where a search is after `taken` tokens; unused places of token rows hold the end."""

    taken: jax.Array
    alive: jax.Array  # (beams, max_tokens), not ended
    sums: jax.Array  # (beams,), their log-probabilities
    logits: jax.Array  # (beams, vocabulary), of what follows them
    past: Any
    ended: jax.Array  # (beams, max_tokens)
    scores: jax.Array  # (beams,), of the ended; -inf where there is none
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
    """The best continuation found, by score = log-probability / tokens**length_penalty.

    The end counts as a token. Each step takes the best 2·beams continuations of the beams: those
    that end, and are among the best `beams` of them, are set apart, and the best `beams` others go
    on. It is over when as many have ended as there are beams and none that goes on has a better
    score so far, or after `max_tokens`, when what has not ended counts too. One beam is greedy.

    Args:
        step: What follows; see `Step`.
        logits: (vocabulary,) of the first token.
        past: What `step` needs of the prompt, for one beam: each leaf gets a leading axis of beams.
        end: The token that ends a text.
        beams: Number of continuations that are followed.
        length_penalty: 0 for the most probable; the larger, the longer.
        max_tokens: Number of tokens after which a search is over.

    Returns:
        Tokens (max_tokens,), filled up with the end, and their score.

    Source: the search of the `transformers` library, with which Li et al. (2021) generate.
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
