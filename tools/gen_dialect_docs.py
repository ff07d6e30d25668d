#!/usr/bin/env python3
"""Write the key tables of docs/dialects/*.md from the tables by which ppfleetx translates configurations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.errors import shown
from ppfleetx.dialects.key_tables import Key, KeyTable, Kind
from ppfleetx.dialects.registry import dialects
from tools.site.pages import filled_page, write_files


def pages() -> dict[Path, str]:
    """Return the text of each dialect's page, by path."""
    found: dict[Path, str] = {}
    for dialect in dialects().values():
        blocks: dict[str, str] = {}
        written: dict[str, KeyTable] = {}
        for name, table in dialect.tables.items():
            blocks[f"keys of {name}"] = _block(name, table, written)
            written[name] = table
        found |= filled_page(f"dialects/{dialect.name}.md", blocks, "tools/gen_dialect_docs.py")
    return found


def _block(name: str, table: KeyTable, earlier: Mapping[str, KeyTable]) -> str:
    """Return the text for ``table``. If it includes most keys of an earlier table, a sentence replaces their
    rows."""
    rows = {_row(name, key): key for key in table.keys}
    for other, keys in earlier.items():
        known = [_row(other, key) for key in keys.keys]
        missing = [key for key, *answer in known if (key, *answer) not in rows]
        if len(missing) < len(known) / 2:
            but = f" except {', '.join(f'`{key}`' for key in missing)}" if missing else ""
            own = [key for row, key in rows.items() if row not in known]
            return f"All keys of [{other}](#keys-{other}){but}, and:\n\n{key_table(own, name)}"
    return key_table(table.keys, name)


def key_table(keys: Iterable[Key], section: str = "") -> str:
    """Return a table that says how each key is treated, with details or reasons. Keys with the same treatment
    share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        name, *answer = _row(section, key)
        names.setdefault(tuple(answer), []).append(f"`{name}`")
    rows = [f"| {', '.join(keys)} | {fate} | {says} |" for (fate, says), keys in names.items()]
    return "\n".join(["| key | here | how, or why |", "|---|---|---|", *rows])


def _row(section: str, key: Key) -> tuple[str, str, str]:
    """Return the cells of a key: name (without the heading's section), treatment, and details or reason."""
    return key.name.removeprefix(f"{section}."), _fate(key), _cell(key.says)


def _fate(key: Key) -> str:
    if key.kind is Kind.MAPPED:
        return ", ".join(f"`{name}`" for name in key.to) or "read"
    if key.kind is Kind.FIXED and key.accepts is not None:
        return f"fixed: {_cell(' or '.join(map(shown, key.accepts)))}"
    return key.kind.value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    write_files(pages, __doc__)
