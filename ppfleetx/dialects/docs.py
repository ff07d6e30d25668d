"""The key tables of ``docs/dialects/*.md``, from the data that the translators work with."""

from __future__ import annotations

from ppfleetx.config.errors import shown
from ppfleetx.dialects.keys import Key, KeyTable, Kind
from ppfleetx.dialects.registry import Dialect

BEGIN, END = "<!-- keys of {name}: made by tools/gen_dialect_docs.py -->", "<!-- end of keys of {name} -->"


def filled(page: str, dialect: Dialect) -> str:
    """``page`` with each key table of ``dialect`` between its marks written again.

    Raises:
        ValueError: a table's marks are missing.
    """
    for name, table in dialect.tables.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no block {begin} ... {end}")
        page = f"{before}{begin}\n\n{key_table(table)}\n\n{end}{after}"
    return page


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
