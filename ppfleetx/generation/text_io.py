"""Read prompts given as strings or token ids, and decode generated tokens to text one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
StopReason = str | int | None
"""What ended a continuation: a stop string or a token of ``stop_token_ids``. None: anything else, such as the
model's end token or the length limit."""


def as_prompts(given: Any) -> tuple[list[Prompt], bool]:
    """Return a user's prompts as a list, and whether ``given`` was a single prompt instead of a list. A
    prompt is a string, or a list, array or tensor of token ids. Raises DataError for anything else."""
    given = _arrays_to_lists(given)
    if isinstance(given, str):
        return [given], True
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | dict):
        raise DataError(f"prompts are a text, token ids, or a list of these, not {shown(given)}")
    listed = list(given)
    if listed and not any(isinstance(one, Iterable) for one in listed):
        return [token_ids(listed)], True
    return [one if isinstance(one, str) else token_ids(one) for one in listed], False


def _arrays_to_lists(given: Any) -> Any:
    if hasattr(given, "numpy"):  # a tensor
        given = given.numpy()
    return given.tolist() if isinstance(given, np.ndarray) else given


def as_texts(given: Any) -> list[str]:
    """Return a string, or an iterable of strings, as a list of strings. Raises DataError for anything
    else."""
    if isinstance(given, str):
        return [given]
    texts = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(one, str) for one in texts):
        raise DataError(f"prompts are a text or a list of texts, not {shown(given)}")
    return texts


def token_ids(prompt: Any) -> list[int]:
    """Return a prompt of token ids (a list, array or tensor) as a list of integers. Raises DataError for
    anything else."""
    prompt = _arrays_to_lists(prompt)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | dict):
        raise DataError(f"a prompt is a text or token ids, not {shown(prompt)}")
    ids = list(prompt)
    wrong = [one for one in ids if isinstance(one, bool) or not isinstance(one, int | np.integer)]
    if wrong:
        raise DataError(f"token ids of a prompt are integers, not {shown(wrong[0])}")
    return [int(one) for one in ids]


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def text_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes that a token adds to the decoded text in UTF-8. SentencePiece's symbol U+2581, for
    example, becomes a space."""
    value = tokenizer.token_bytes(token)
    if tokenizer.is_byte_level:
        return value
    # A byte token such as <0xE4> stands for the byte 0xE4.
    single = _BYTE_TOKEN.fullmatch(value.decode("utf-8", "replace"))
    return bytes([int(single.group(1), 16)]) if single else value.replace("\u2581".encode(), b" ")


class NoTokenizer:
    """Stands in for the tokenizer of a model that has none. Prompts and results are token ids, and decoded
    text is always empty."""

    place = "the model's vocabulary"
    prefix_ids = end_ids = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_prompt(self, text: str) -> NoReturn:
        raise ConfigError(
            "the model has no tokenizer: give token ids in place of texts, or name a tokenizer with "
            "Data.tokenizer.dir",
            key="Data.tokenizer",
        )

    @property
    def start_id(self) -> NoReturn:
        raise DataError("a prompt has no token ids, and without a tokenizer nothing says how a text begins")

    def stream_decoder(self, **_options: Any) -> NoTokenizer:
        return self

    def feed(self, _token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def pending(self) -> str:
        return ""


class RowText:
    """Decodes the generated tokens of one sequence one by one, up to the first stop string.

    Args:
        prompt: the token ids of the sequence's prompt.
        emit: callback for each new piece of text.
        end_ids: the tokens that end the sequence, and the stop reason of each.
        min_tokens: a stop string that is complete within this many tokens does not end the sequence.
        include_stop: what ends the sequence, a stop string or an end token, is part of the text.

    Attributes:
        stop_reason: the stop string that the text contains, or the stop reason of the end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        stops: Sequence[str],
        prompt: Sequence[int],
        emit: Callable[[str], None] | None = None,
        *,
        end_ids: Mapping[int, StopReason] | None = None,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.stop_reason: StopReason = None
        self._end_ids, self._include_stop = end_ids or {}, include_stop
        self._min_tokens, self._num_tokens = min_tokens, 0
        self._num_early = 0  # the first characters of the text held back, in which no stop string may end
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=True, after=prompt)
        self._stops, self._emit = tuple(stops), emit
        self._sent: list[str] = []
        self._held = ""
        self._ended = False

    def feed(self, token_id: int) -> bool:
        """Add a token. Returns whether the text contains a complete stop string. Tokens after the stop
        string are ignored."""
        if self._ended:
            return True
        self._num_tokens += 1
        is_end = token_id in self._end_ids
        if is_end:
            self.stop_reason = self._end_ids[token_id]
        if not is_end or self._include_stop:
            self._held += self._decoder.feed(token_id)
            pending = self._decoder.pending() if self._stops else ""
            if self._num_tokens <= self._min_tokens:
                self._num_early = len(self._held + pending)
            if pending and any(self._find(stop, pending) >= 0 for stop in self._stops):
                self._held += self._decoder.finish()
            self._release()
        return self._ended

    def finish(self) -> str:
        """Emit the text that was held back, and return the whole generated text."""
        if not self._ended:
            self._held += self._decoder.finish()
            self._release()
        if not self._ended:
            self._send(self._held)
            self._held, self._ended = "", True
        return "".join(self._sent)

    def _release(self) -> None:
        """Emit the pending text, except a suffix that could be the beginning of a stop string. If there is a
        complete stop string, emit only the text before it, or up to its end with ``include_stop``."""
        found = [(place, stop) for stop in self._stops if (place := self._find(stop)) >= 0]
        if found:
            place, self.stop_reason = min(found, key=lambda one: one[0])
            self._send(self._held[: place + len(self.stop_reason) * self._include_stop])
            self._held, self._ended = "", True
            return
        safe = len(self._held) - self._length_of_possible_stop()
        self._send(self._held[:safe])
        self._held, self._num_early = self._held[safe:], max(0, self._num_early - safe)

    def _find(self, stop: str, pending: str = "") -> int:
        return (self._held + pending).find(stop, max(0, self._num_early - len(stop) + 1))

    def _length_of_possible_stop(self) -> int:
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )

    def _send(self, piece: str) -> None:
        if piece:
            self._sent.append(piece)
            if self._emit is not None:
                self._emit(piece)
