"""Splits text into the tokens of Gemma 3, by merging pairs of pieces, and joins them."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

PADDING, END, START = 0, 1, 2
_SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Words with the spaces in front of them. One piece of Gemma, ">▁</", has a space after another
# character, so no merge crosses these words.
_WORDS = re.compile(f"{_SPACE}*(?:>{_SPACE}(?=</)|[^{_SPACE}])+|{_SPACE}+$")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Splits text by the pieces and scores that are in a file of weights.

    Attributes:
        numbers: The number of each piece.
        scores: The score of each piece, by number. The pair whose piece scores highest is merged
            first.
    """

    numbers: Mapping[str, int]
    scores: Mapping[int, float]
    _known: dict[str, list[int]] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, after the token that starts every text."""
        found = [START]
        for word in _WORDS.findall(text.replace(" ", _SPACE)):
            if word not in self._known:
                self._known[word] = self._split(word)
            found += self._known[word]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without those that start, end and pad texts."""
        pieces = (self.pieces[token] for token in tokens if token not in (PADDING, END, START))
        found = b"".join(
            bytes([int(piece[3:5], 16)]) if _BYTE.fullmatch(piece) else piece.encode()
            for piece in pieces
        )
        return found.decode("utf-8", "replace").replace(_SPACE, " ")

    def bos_id(self) -> int:
        """Returns the token that starts every text, which tunix's sampler asks for."""
        return START

    def eos_id(self) -> int:
        """Returns the token that ends a text."""
        return END

    def pad_id(self) -> int:
        """Returns the token that fills a row."""
        return PADDING

    @functools.cached_property
    def pieces(self) -> Mapping[int, str]:
        """The piece of each number."""
        return {number: piece for piece, number in self.numbers.items()}

    def _split(self, word: str) -> list[int]:
        """Returns the tokens of a word with the spaces in front of it."""
        pieces = list(word)
        while (place := self._next_merge(pieces)) is not None:
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        return [number for piece in pieces for number in self._numbers(piece)]

    def _next_merge(self, pieces: list[str]) -> int | None:
        """Returns the place of the pair to merge, the first of those that score highest."""
        found = [
            (-self.scores[self.numbers[pair]], i)
            for i in range(len(pieces) - 1)
            if (pair := pieces[i] + pieces[i + 1]) in self.numbers
        ]
        return min(found)[1] if found else None

    def _numbers(self, piece: str) -> list[int]:
        """Returns the number of a piece, or those of its bytes."""
        if piece in self.numbers:
            return [self.numbers[piece]]
        return [self.numbers[f"<0x{byte:02X}>"] for byte in piece.encode()]
