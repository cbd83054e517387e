"""Turns texts into rows of token numbers with the tokenizer of a published model."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training import ConfigError

_CHUNK = 8192  # texts that are encoded at once; an encoding takes much more memory than its tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Settings that turn texts into arrays: a tokenizer and a row length.

    Text is never read as a special token: "</s>" within a sentence is four characters.

    Attributes:
        folder: Folder of a published model, with tokenizer.json.
        length: Number of tokens per row. Longer texts are cut, and shorter ones are padded.
    """

    folder: Path | None
    length: int

    def sentences(self, first: Sequence[str], second: Sequence[str] | None = None) -> np.ndarray:
        """Returns rows <s> A </s> or <s> A </s></s> B </s> with <pad>, as in RoBERTa.

        If a pair is too long, the longer text is cut.

        Returns:
            (len(first), length), int32.

        Raises:
            ConfigError: The tokenizer is missing, or it lacks these tokens.
        """
        from tokenizers import processors

        tokenizer = self.tokenizer()
        start, end, padding = (self._special(name) for name in ("<s>", "</s>", "<pad>"))
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", end), ("<s>", start), add_prefix_space=False
        )
        tokenizer.enable_truncation(self.length, strategy="longest_first")
        texts: list[Any] = list(first if second is None else zip(first, second, strict=True))
        rows = np.full((len(texts), self.length), padding, np.int32)
        for row, tokens in zip(rows, _encode(tokenizer, texts), strict=True):
            row[: len(tokens)] = tokens
        return rows

    def tokenizer(self) -> Any:
        """Returns the tokenizer of the `tokenizers` library, or raises a `ConfigError`."""
        if self.folder is None:
            raise ConfigError(
                "`pretrained` must be given for texts, which need a tokenizer, got None. Pass "
                "--pretrained, the directory of a published model with tokenizer.json."
            )
        return _load(self.folder)

    def _special(self, name: str) -> int:
        number = self.tokenizer().token_to_id(name)
        if number is None:
            raise ConfigError(
                f"The tokenizer in pretrained={str(self.folder)!r} must have the token {name!r}, "
                "got none. Use a tokenizer of an encoder such as roberta-base."
            )
        return number


@functools.lru_cache(maxsize=4)
def _load(folder: Path) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Texts need {error.name}, which is not installed. Run `uv sync`."
        ) from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"`pretrained` must contain tokenizer.json, got {str(folder)!r} without it. Put the "
            "published file of the tokenizer there."
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(
            f"{path} cannot be read: it is not a tokenizer of the `tokenizers` library ({error}). "
            "Fetch it again from the page of the model."
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Any, texts: Sequence[Any]) -> Iterator[list[int]]:
    for start in range(0, len(texts), _CHUNK):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + _CHUNK]):
            yield encoding.ids
