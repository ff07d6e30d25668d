"""Whether a zstandard file ends where a frame ends; the library reads one that is cut off without a word."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

_FRAME, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_RLE_BLOCK = 1
_DICTIONARY_BYTES, _CONTENT_SIZE_BYTES = (0, 1, 2, 4), (0, 2, 4, 8)


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class FrameFollower:
    """A compressed file that is read through this, and followed from header to header (RFC 8878, section 3).

    What frames hold is the library's to check. Reading raises EOFError when the file ends anywhere but behind
    a frame, and ValueError when what follows a frame is none.

    Args:
        source: the compressed bytes.
    """

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._header = b""  # what there is so far of the header being read
        self._missing, self._parse = 4, self._magic
        self._skip = 0  # bytes up to the next header
        self._num_frames = 0
        self._has_checksum = False

    def read(self, size: int = -1, /) -> bytes:
        """As `read` of the file."""
        data = self._source.read(size)
        if data:
            self._follow(data)
        elif size:
            self._check_end()
        return data

    def _check_end(self) -> None:
        between_frames = self._parse == self._magic and not self._header and not self._skip
        if not between_frames:
            raise EOFError("it is cut off within a zstandard frame")
        if not self._num_frames:
            raise EOFError("it is empty")

    def _follow(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
            else:
                step = min(self._missing, len(data) - position)
                self._header += data[position : position + step]
                self._missing -= step
                if not self._missing:
                    header, self._header = self._header, b""
                    self._parse(header)
            position += step

    def _expect(self, num_bytes: int, parse: Callable[[bytes], None]) -> None:
        self._missing, self._parse = num_bytes, parse

    def _magic(self, header: bytes) -> None:
        (magic,) = struct.unpack("<I", header)
        self._num_frames += 1
        if magic == _FRAME:
            self._expect(1, self._descriptor)
        elif magic & 0xFFFFFFF0 == _SKIPPABLE:
            self._expect(4, self._skippable)
        elif self._num_frames == 1:
            raise ValueError("it is not zstandard")
        else:
            raise ValueError("something that is not a zstandard frame follows its last frame")

    def _skippable(self, header: bytes) -> None:
        (self._skip,) = struct.unpack("<I", header)
        self._expect(4, self._magic)

    def _descriptor(self, header: bytes) -> None:
        flags = header[0]
        is_single_segment = flags >> 5 & 1
        self._has_checksum = bool(flags >> 2 & 1)
        content_size = _CONTENT_SIZE_BYTES[flags >> 6] or is_single_segment
        window = 1 - is_single_segment
        self._skip = window + _DICTIONARY_BYTES[flags & 3] + content_size
        self._expect(3, self._block)

    def _block(self, header: bytes) -> None:
        value = int.from_bytes(header, "little")
        is_last, kind, size = value & 1, value >> 1 & 3, value >> 3
        self._skip = 1 if kind == _RLE_BLOCK else size
        if is_last:
            self._skip += 4 * self._has_checksum
            self._expect(4, self._magic)
        else:
            self._expect(3, self._block)
