"""Generation as an iterator: it runs in a thread, and its text is taken from a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

Piece = tuple[int, int, str]
"""Number of the prompt, number of its continuation, text."""


class _AbandonedError(Exception):
    """Nobody reads the text any more."""


def stream_of(generate: Callable[[Callable[[int, int, str], None]], Any]) -> Iterator[Piece]:
    """Yield each piece of text that ``generate`` passes to ``on_text``.

    If generation fails, its error is raised after the last piece. When the iterator is closed or dropped,
    generation ends at its next token.
    """
    pieces: queue.Queue[Piece | BaseException | None] = queue.Queue()
    abandoned = threading.Event()

    def on_text(prompt: int, copy: int, piece: str) -> None:
        if abandoned.is_set():
            raise _AbandonedError
        pieces.put((prompt, copy, piece))

    def work() -> None:
        end: BaseException | None = None
        try:
            generate(on_text)
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  (raised in the thread that reads)
            end = error
        pieces.put(end)

    thread = threading.Thread(target=work, name="generation", daemon=True)
    thread.start()
    try:
        while True:
            found = pieces.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        abandoned.set()
        thread.join()
