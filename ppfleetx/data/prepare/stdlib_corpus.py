"""Make a small corpus of real text, for examples and tests, from the source files of Python's standard
library."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from pathlib import Path

from ppfleetx.config.errors import DataError
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.output_files import atomic_write, refuse_unwritable

# Half of the library is tests, mostly tables of numbers and strings. The other folders are not part of the
# library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


@os_errors(DataError)
def write_stdlib_corpus(
    output: str | os.PathLike[str], seed: int = 1234, *, overwrite: bool = False
) -> tuple[int, int]:
    """Write the source files of the Python standard library, shuffled, to a JSON Lines file with the fields
    ``path`` and ``text``. Tests, empty files and files that are not UTF-8 are left out. Returns the number of
    documents, and the size of their texts in bytes. Raises DataError if the file cannot be written, or exists
    and ``overwrite`` is False."""
    output = Path(output)
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists already; --overwrite replaces it")
    refuse_unwritable(output.parent, "--output")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_files()
    random.Random(seed).shuffle(files)
    num_documents = num_bytes = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output, "w") as file:
        for path in files:
            data = path.read_bytes()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if not text:
                continue
            name = path.relative_to(root).as_posix()
            file.write(json.dumps({"path": name, "text": text}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_bytes += len(data)
    return num_documents, num_bytes
