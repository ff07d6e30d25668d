"""Write docs/commands.md: every verb of the command ppfleetx with its arguments, as ``--help`` has them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.commands.verbs import GROUPS, Verb
from ppfleetx.utils.cli import run_tool
from tools.generated import write_files

_HEAD = """# Commands

Made by `tools/gen_command_docs.py` from the programs' own `--help`; do not edit.

`ppfleetx VERB` and the script named beside a verb are the same program. [The command ppfleetx](cli.md) says
how configurations are named and how the shell completes it.
"""


def main() -> int:
    """Write the page, or check it."""
    return write_files(lambda: {_ROOT / "docs" / "commands.md": commands_markdown()}, __doc__)


def commands_markdown() -> str:
    """The text of ``docs/commands.md``."""
    scripts = {
        verb: path.relative_to(_ROOT).as_posix() for path in _scripts() for verb in _verbs_run_by(path)
    }
    lines = [_HEAD, "| verb | script | what it does |", "|---|---|---|"]
    verbs = [verb for group in GROUPS.values() for verb in group]
    lines += [f"| [`{v.name}`](#{v.name}) | {_code(scripts.get(v.name))} | {v.help} |" for v in verbs]
    return "\n".join([*lines, "", *(_section(verb) for verb in verbs)]).rstrip() + "\n"


def _scripts() -> list[Path]:
    return sorted([*_ROOT.glob("tools/*.py"), *_ROOT.glob("tasks/**/*.py")])


def _verbs_run_by(path: Path) -> list[str]:
    return re.findall(r"run_program\(\"([\w-]+)\"", path.read_text("utf-8"))


def _section(verb: Verb) -> str:
    parser = verb.command().parser(f"ppfleetx {verb.name}")
    description = (parser.description or "").strip().replace("``", "`")
    if re.search(r"^  ", description, re.MULTILINE):
        description = f"```text\n{description}\n```"
    lines = [f"## {verb.name}", "", description, ""]
    arguments = [f"| {_signature(action)} | {_meaning(action, parser)} |" for action in _arguments(parser)]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|", *arguments, ""]
    if parser.epilog:
        lines += ["```text", parser.epilog.strip() % {"prog": parser.prog}, "```", ""]
    return "\n".join(lines)


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


def _meaning(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = action.help % {**vars(action), "prog": parser.prog} if action.help else ""
    if action.required and action.option_strings:
        text += " (required)"
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    run_tool(main)
