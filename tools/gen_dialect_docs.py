#!/usr/bin/env python3
"""Write the key tables of docs/dialects/*.md from the translators' own tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.errors import shown
from ppfleetx.dialects.keys import Key, KeyTable, Kind
from ppfleetx.dialects.registry import Dialect, dialects
from ppfleetx.utils.cli import run_tool

BEGIN, END = "<!-- keys of {name}: made by tools/gen_dialect_docs.py -->", "<!-- end of keys of {name} -->"


def main() -> int:
    """Write the pages; with ``--check`` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    args = parser.parse_args()
    stale = 0
    for dialect in dialects().values():
        page = _ROOT / "docs" / "dialects" / f"{dialect.name}.md"
        if not page.exists():
            print(f"not written yet: {page.relative_to(_ROOT)}")
            continue
        text = page.read_text("utf-8")
        if (fresh := filled(text, dialect)) == text:
            continue
        stale += 1
        print(f"{'stale' if args.check else 'written'}: {page.relative_to(_ROOT)}")
        if not args.check:
            page.write_text(fresh, "utf-8")
    return 1 if stale and args.check else 0


def filled(page: str, dialect: Dialect) -> str:
    """``page`` with each key table of ``dialect`` between its marks written again.

    Raises:
        ValueError: a table's marks are missing.
    """
    written: dict[str, KeyTable] = {}
    for name, table in dialect.tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no block {begin} ... {end}")
        page = f"{before}{begin}\n\n{_block(name, table, written)}\n\n{end}{after}"
        written[name] = table
    return page


def _block(name: str, table: KeyTable, earlier: Mapping[str, KeyTable]) -> str:
    """The rows of ``table``; a sentence stands for most keys of an earlier table, if it has them, too."""
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
    """What happens to each key, and how or why; keys with the same answer share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        name, *answer = _row(section, key)
        names.setdefault(tuple(answer), []).append(f"`{name}`")
    rows = [f"| {', '.join(keys)} | {fate} | {says} |" for (fate, says), keys in names.items()]
    return "\n".join(["| key | here | how, or why |", "|---|---|---|", *rows])


def _row(section: str, key: Key) -> tuple[str, str, str]:
    """Name (without the section that the heading names), what happens to it, how or why."""
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
    run_tool(main)
