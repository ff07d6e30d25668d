"""Write docs/commands.md: every command of tools/ and tasks/ with its arguments, as ``--help`` has them."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.utils.cli import run_tool

_HEAD = """# Commands

Made by `tools/gen_command_docs.py` from the programs' own `--help`; do not edit.

Run them from the project's directory with the environment's Python.

| exit code | meaning |
|---|---|
| 0 | all is well; also a training that was stopped with Ctrl-C or SIGTERM and has saved |
| 1 | a comparison or a verification found something |
| 2 | a mistake of the user; one sentence says which |
| 3 | another process of the job was lost, or does not answer |
| 130 | interrupted |
"""


class _Parser(BaseException):
    """Carries a program's parser out of its ``main``; no ``except Exception`` may stop it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def main() -> int:
    """Write the page; with ``--check`` only say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is stale")
    args = parser.parse_args()
    page = _ROOT / "docs" / "commands.md"
    text = commands_markdown()
    stale = not page.exists() or page.read_text("utf-8") != text
    if stale:
        print(f"{'stale' if args.check else 'written'}: {page.relative_to(_ROOT)}")
    if stale and not args.check:
        page.write_text(text, "utf-8")
    return 1 if args.check and stale else 0


def commands_markdown() -> str:
    """The text of ``docs/commands.md``."""
    sections = [_section(path.relative_to(_ROOT).as_posix(), parser_of(path)) for path in programs()]
    return "\n".join([_HEAD, *sections])


def programs() -> list[Path]:
    """The files that are commands."""
    files = [*_ROOT.glob("tools/*.py"), *_ROOT.glob("tasks/**/*.py")]
    return sorted(path for path in files if "run_tool(main)" in path.read_text("utf-8"))


def parser_of(path: Path) -> argparse.ArgumentParser:
    """The argument parser that a program makes. Raises RuntimeError if its ``main`` parses nothing."""

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Parser(parser)

    program = runpy.run_path(str(path), run_name="documented")
    name = path.relative_to(_ROOT).as_posix()
    parsing = mock.patch.object(argparse.ArgumentParser, "parse_args", stop)
    with parsing, mock.patch.object(sys, "argv", [name]):
        try:
            program["main"]()
        except _Parser as found:
            return found.parser
    raise RuntimeError(f"{name} parses no arguments")


def _section(title: str, parser: argparse.ArgumentParser) -> str:
    description = (parser.description or "").strip().replace("``", "`")
    if re.search(r"^  ", description, re.MULTILINE):
        description = f"```text\n{description}\n```"
    lines = [f"## {title}", "", description, "", "| argument | meaning |", "|---|---|"]
    lines += [f"| {_signature(action)} | {_meaning(action, parser)} |" for action in _arguments(parser)]
    for name, child in _children(parser):
        lines += ["", _section(f"{title} {name}", child).rstrip()]
    return "\n".join(lines) + "\n"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        hidden = action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction)
        if not hidden and not isinstance(action, argparse._SubParsersAction):
            yield action


def _children(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


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
    return ", ".join(f"`{option} {words}`".replace(" `", "`") for option in action.option_strings)


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""
    told = "default" in text
    if action.required and action.option_strings:
        text += " (required)"
    elif action.default not in (None, False, [], argparse.SUPPRESS) and not told and action.nargs != 0:
        text += f" (default: `{action.default}`)"
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    run_tool(main)
