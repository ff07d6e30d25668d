"""Common functions of the programs that write generated parts of the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ppfleetx.utils.exit_codes import run_tool

ROOT = Path(__file__).resolve().parents[2]
_BEGIN, _END = "<!-- {name}: made by {tool} -->", "<!-- end of {name} -->"


def write_files(texts: Callable[[], Mapping[Path, str]], description: str | None) -> None:
    """Run a program that generates documentation: write the files whose texts have changed, and end the
    process with the exit code.

    With the option ``--check``, nothing is written, and the exit code is 1 if a file is stale.
    """
    run_tool(partial(_write_files, texts, description))


def _write_files(texts: Callable[[], Mapping[Path, str]], description: str | None) -> int:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    checks = parser.parse_args().check
    is_stale = False
    for path, text in texts().items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        is_stale = True
        print(f"{'stale' if checks else 'written'}: {path.relative_to(ROOT)}")
        if not checks:
            path.write_text(text, "utf-8")
    return 1 if checks and is_stale else 0


def filled_page(name: str, blocks: Mapping[str, str], tool: str) -> dict[Path, str]:
    """Return {path: text} of ``docs/NAME`` with its generated blocks filled in, for :func:`write_files`."""
    path = ROOT / "docs" / name
    return {path: filled(path.read_text("utf-8"), blocks, tool)}


def filled(page: str, blocks: Mapping[str, str], tool: str) -> str:
    """Return the text ``page`` with the ``blocks`` that ``tool`` generates filled in.

    Raises:
        ValueError: a block's marks are missing.
    """
    for name, text in blocks.items():
        begin, end = _BEGIN.format(name=name, tool=tool), _END.format(name=name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no block {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page
