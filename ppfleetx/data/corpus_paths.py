"""From a path in the configuration to opened token corpora, whichever format they are in."""

from __future__ import annotations

import os
from pathlib import Path

from ppfleetx.config.errors import DataError, MissingDataError
from ppfleetx.data.fleetx_format import SUFFIXES as FLEETX_SUFFIXES
from ppfleetx.data.fleetx_format import FleetXDataset
from ppfleetx.data.indexed import IndexedDataset, bin_path, idx_path
from ppfleetx.data.token_store import TokenStore
from ppfleetx.utils.foreign_files import os_errors

_SUFFIXES = (".bin", ".idx", *FLEETX_SUFFIXES)


@os_errors(DataError)
def open_tokens(prefix: str | os.PathLike[str]) -> TokenStore:
    """Open the corpus with this prefix (a suffix is taken off); ``.bin``/``.idx`` wins over FleetX's.

    Raises:
        DataError: there is no corpus, or it is damaged or holds no token ids.
    """
    text = _without_suffix(os.fspath(prefix))
    has_pair = bin_path(text).exists() or idx_path(text).exists()
    if not has_pair and any(Path(f"{text}{suffix}").exists() for suffix in FLEETX_SUFFIXES):
        return FleetXDataset(text)
    corpus = IndexedDataset(text)
    if corpus.dtype.kind == "f":
        raise DataError(f"{idx_path(text)} says that tokens are stored as {corpus.dtype}: they are not ids")
    return corpus


@os_errors(DataError)
def find_prefixes(entry: str | os.PathLike[str]) -> list[str]:
    """Prefixes of one entry of ``input_dir``: all corpora of a directory, by name, or the entry itself.

    Raises:
        MissingDataError: the directory holds no corpus.
    """
    text = os.fspath(entry)
    if not Path(text).is_dir():
        return [_without_suffix(text)]
    names = (str(path) for path in Path(text).iterdir() if path.is_file())
    found = sorted({_without_suffix(name) for name in names if name.endswith(_SUFFIXES)})
    if not found:
        raise MissingDataError(
            f"no corpus in {text}: it holds no {', '.join(f'*{suffix}' for suffix in _SUFFIXES)}"
        )
    return found


def _without_suffix(path: str) -> str:
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    return path
