"""Write docs/commands.md: all verbs of the command ppfleetx, with their arguments as in ``--help``."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.commands.main import GROUPS
from tools.site.pages import write_files

Row = tuple[str, str]
"""An argument's signature and its meaning."""

_MANY = 5  # an option of at least this many verbs is listed only once

_HEAD = """# Commands

Made by `tools/gen_command_docs.py` from the programs' own `--help`; do not edit.

`ppfleetx VERB` and the script named beside a verb are the same program. [The command ppfleetx](cli.md) says
how configurations are named and how the shell completes it.
"""


def commands_markdown() -> str:
    """Return the text of ``docs/commands.md``."""
    scripts = {
        verb: path.relative_to(_ROOT).as_posix() for path in _scripts() for verb in _verbs_run_by(path)
    }
    lines = [_HEAD, "| verb | script | what it does |", "|---|---|---|"]
    verbs = [verb for group in GROUPS.values() for verb in group]
    lines += [f"| [`{v.name}`](#{v.name}) | {_code(scripts.get(v.name))} | {v.help} |" for v in verbs]
    parsers = {verb.name: verb.command().parser(f"ppfleetx {verb.name}") for verb in verbs}
    counts = Counter(
        _row(action, parser)
        for parser in parsers.values()
        for action in _arguments(parser)
        if action.option_strings
    )
    shared = [row for row, count in counts.items() if count >= _MANY]
    lines += ["", "## Options of many verbs", "", *_table(shared)]
    return (
        "\n".join([*lines, *(_section(name, parser, shared) for name, parser in parsers.items())]).rstrip()
        + "\n"
    )


def _scripts() -> list[Path]:
    return sorted([*_ROOT.glob("tools/*.py"), *_ROOT.glob("tasks/**/*.py")])


def _verbs_run_by(path: Path) -> list[str]:
    return re.findall(r"run_program\(\"([\w-]+)\"", path.read_text("utf-8"))


def _section(name: str, parser: argparse.ArgumentParser, shared: Collection[Row]) -> str:
    """Return a verb's section: its description, its own arguments, and the names of its shared arguments."""
    description = (parser.description or "").strip().replace("``", "`")
    if re.search(r"^  ", description, re.MULTILINE):
        description = f"```text\n{description}\n```"
    lines = [f"## {name}", "", description, ""]
    rows = {_row(action, parser): action for action in _arguments(parser)}
    if common := [action for row, action in rows.items() if row in shared]:
        names = [f"`{one.option_strings[0]}`{_required(one)}" for one in common]
        lines += [f"[Options of many verbs](#options-of-many-verbs): {', '.join(names)}.", ""]
    own = [(row[0], f"{row[1]}{_required(one)}") for row, one in rows.items() if row not in shared]
    lines += _table(own) if own else []
    if parser.epilog:
        lines += ["```text", parser.epilog.strip() % {"prog": parser.prog}, "```", ""]
    return "\n".join(lines)


def _table(rows: Iterable[Row]) -> list[str]:
    return [
        "| argument | meaning |",
        "|---|---|",
        *(f"| {signature} | {meaning} |" for signature, meaning in rows),
        "",
    ]


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield action


def _signature(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    words = " ".join(value) if isinstance(value, tuple) else str(value)
    if action.choices:
        words = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    if action.nargs in ("*", "+", argparse.REMAINDER):
        words += " ..."
    if not action.option_strings:
        return f"`{words}`"
    if action.nargs == 0:
        words = ""
    return ", ".join(_code(f"{option} {words}".strip()) for option in action.option_strings)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> Row:
    text = action.help % {**vars(action), "prog": parser.prog} if action.help else ""
    return _signature(action), " ".join(text.split()).replace("|", "\\|")


def _required(action: argparse.Action) -> str:
    return " (required)" if action.required and action.option_strings else ""


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    write_files(lambda: {_ROOT / "docs" / "commands.md": commands_markdown()}, __doc__)
