"""The bytes of a pickle as they are read: never more than there are, and long ones left in the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ppfleetx.checkpoint.foreign.lazy import read_bytes
from ppfleetx.config.errors import CheckpointError

# What describes tensors takes some hundred bytes for each; their elements are not among this.
MAX_DESCRIPTION_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class RawBytes:
    """A long string of a pickle, still in its file.

    Attributes:
        path, start, length: the range of the file.
        is_text: it is UTF-8 text whose characters stand for one byte each, as protocols 0 to 2 write bytes.
    """

    path: Path
    start: int
    length: int
    is_text: bool = False

    def may_hold(self, count: int) -> bool:
        """Whether these can be ``count`` bytes; of a text only reading it says how many there are."""
        return count <= self.length <= 2 * count if self.is_text else self.length == count

    def tobytes(self) -> memoryview | bytes:
        """The bytes. Raises CheckpointError when they cannot be read or are no bytes."""
        content = read_bytes(self.path, self.start, self.length).data
        if not self.is_text:
            return content
        try:
            return str(content, "utf-8").encode("latin-1")
        except UnicodeError as error:
            raise CheckpointError(f"{self.path} is damaged: an array in it is not made of bytes") from error


class PickleInput:
    """A stream that never gives more bytes than it has left, nor more than descriptions of weights need."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        here = file.tell()
        self._end = file.seek(0, 2)
        file.seek(here)
        self._left = MAX_DESCRIPTION_BYTES

    def tell(self) -> int:
        """Position in the file, in bytes."""
        return self._file.tell()

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes.

        Raises:
            CheckpointError: the pickle ends before, or is larger than what is allowed.
        """
        if count < 0 or count > self._end - self._file.tell():
            raise CheckpointError("not a sound pickle: it ends too early")
        self._spend(count)
        return self._file.read(count)

    def readline(self) -> bytes:
        """The next line, with its end."""
        line = self._file.readline(self._left + 1)
        self._spend(len(line))
        return line

    def skip(self, count: int) -> int:
        """Pass over some bytes; returns where they begin.

        Raises:
            CheckpointError: the pickle ends before.
        """
        start = self._file.tell()
        if count > self._end - start:
            raise CheckpointError("not a sound pickle: it ends too early")
        self._file.seek(start + count)
        return start

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise CheckpointError(
                f"more than {MAX_DESCRIPTION_BYTES} bytes of its pickle are something else than arrays"
            )
