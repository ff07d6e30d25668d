"""Text of a row as it grows: whole characters only, and never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.prompts import NoTokenizer


class RowText:
    """Decodes one row token by token.

    Args:
        tokenizer: of the model.
        stops: texts before which the row ends.
        prompt: ids that the row goes on from, which may decide how its text begins.
        emit: given each new piece of text once it is certain to belong to the result.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        stops: Sequence[str],
        prompt: Sequence[int],
        emit: Callable[[str], None] | None = None,
    ) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=True, after=prompt)
        self._stops, self._emit = tuple(stops), emit
        self._sent: list[str] = []
        self._held = ""
        self._ended = False

    def feed(self, token_id: int) -> bool:
        """Take one token. Returns whether a stop string is complete; later tokens are ignored."""
        if not self._ended:
            self._held += self._decoder.feed(token_id)
            self._release()
        return self._ended

    def finish(self) -> str:
        """No more tokens: send what was held back and give the whole text."""
        if not self._ended:
            self._held += self._decoder.finish()
            self._release()
        if not self._ended:
            self._send(self._held)
            self._held, self._ended = "", True
        return "".join(self._sent)

    def _release(self) -> None:
        """Send what can no longer become part of a stop string; end before one that is complete."""
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._send(self._held[: min(found)])
            self._held, self._ended = "", True
            return
        safe = len(self._held) - self._possible_start()
        self._send(self._held[:safe])
        self._held = self._held[safe:]

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
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
