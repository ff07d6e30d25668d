#!/usr/bin/env python3
"""Write the key tables of docs/dialects/*.md from the translators' own tables."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.errors import shown
from ppfleetx.dialects.keys import Key, KeyTable, Kind
from ppfleetx.dialects.registry import dialects
from ppfleetx.utils.cli import run_tool
from tools.generated import filled_page, write_files


def pages() -> dict[Path, str]:
    """The page of each dialect."""
    found: dict[Path, str] = {}
    for dialect in dialects().values():
        blocks = {f"keys of {name}": key_table(table) for name, table in dialect.tables.items()}
        found |= filled_page(f"dialects/{dialect.name}.md", blocks, "tools/gen_dialect_docs.py")
    return found


def main() -> int:
    """Write the pages, or check them."""
    return write_files(pages, __doc__)


def key_table(table: KeyTable) -> str:
    """One row per key: name, what happens to it, and how or why."""
    rows = [f"| `{key.name}` | {_fate(key)} | {_cell(key.says)} |" for key in table.keys]
    return "\n".join(["| key | here | how, or why |", "|---|---|---|", *rows])


def _fate(key: Key) -> str:
    if key.kind is Kind.MAPPED:
        return ", ".join(f"`{name}`" for name in key.to) or "read"
    if key.kind is Kind.FIXED and key.accepts is not None:
        return f"fixed: {_cell(' or '.join(map(shown, key.accepts)))}"
    return key.kind.value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    run_tool(main)
