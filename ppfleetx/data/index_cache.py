"""Index arrays kept on disk between runs: written whole or not at all, checked when read, else rebuilt.

The key says everything that decides the arrays, so equal keys mean equal content: builders that run at the
same time write the same bytes, and whichever rename comes last does no harm.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import available_bytes

Arrays = dict[str, np.ndarray]

_READ_BYTES = 16 << 20


def load_or_build(
    directory: Path,
    key: str,
    names: tuple[str, ...],
    build: Callable[[], Arrays],
    about: Mapping[str, Any],
    *,
    num_bytes: int,
) -> Arrays:
    """The arrays stored under ``key``, memory-mapped; built and stored first if missing or damaged.

    Files: ``{key}-{name}.npy`` per array, and ``{key}.json`` with length and checksum of each, written last.
    If the directory cannot be written, a warning is logged and every process builds the arrays.

    Args:
        names: the arrays that ``build`` returns.
        about: the meaning of the key, written to the JSON file for people to read.
        num_bytes: approximate memory for building them.

    Raises:
        DataError: the arrays are not stored, and there is not enough memory to build them.
    """
    stored = _load(directory, key, names)
    if stored is not None:
        return stored
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise DataError(
            f"the order of the samples takes {num_bytes / 2**30:,.1f} GiB of memory to build, and "
            f"{available / 2**30:,.1f} GiB are free. It holds Engine.max_steps x Global.global_batch_size "
            "samples (Eval: eval_iters, Test: test_iters): make one of them smaller"
        )
    built = build()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _store(directory, key, built, about)
    except OSError as error:
        get_logger().warning(
            f"the index maps cannot be kept in {directory} ({error.strerror}), so every process builds them "
            "again; Data.<mode>.dataset.cache_dir may name a directory that can be written"
        )
        return built
    return _load(directory, key, names) or built


def _array_path(directory: Path, key: str, name: str) -> Path:
    return directory / f"{key}-{name}.npy"


def _store(directory: Path, key: str, arrays: Arrays, about: Mapping[str, Any]) -> None:
    entries = {}
    for name, array in arrays.items():
        path = _array_path(directory, key, name)
        with atomic_write(path) as file:
            np.save(file, array, allow_pickle=False)
        entries[name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    with atomic_write(directory / f"{key}.json", "w") as file:
        json.dump({"about": dict(about), "arrays": entries}, file, indent=1)


def _load(directory: Path, key: str, names: tuple[str, ...]) -> Arrays | None:
    """None when the arrays are missing, or (with a warning) damaged."""
    description = directory / f"{key}.json"
    if not description.is_file():
        return None
    try:
        entries = json.loads(description.read_text("utf-8"))["arrays"]
        paths = {name: _array_path(directory, key, name) for name in names}
        whole = all(_is_whole(path, entries[name]) for name, path in paths.items())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        get_logger().warning(f"the index maps {directory / key}-*.npy are damaged and are built again")
        return None
    return {n: np.load(p, mmap_mode="r", allow_pickle=False).view(np.ndarray) for n, p in paths.items()}


def _is_whole(path: Path, entry: Mapping[str, int]) -> bool:
    return path.stat().st_size == entry["bytes"] and _crc32(path) == entry["crc32"]


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
