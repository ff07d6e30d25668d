"""Implement ``ppfleetx configs``, which lists and copies configurations, and ``ppfleetx completion``, which
prints a completion script for a shell."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ppfleetx.commands.main import PROGRAM, VERBS
from ppfleetx.commands.options import Command, positional
from ppfleetx.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Configs(Command):
    """List the configurations that ship with ppfleetx, or copy one to edit.

    Other verbs accept these names after -c; the prefix `gpt/` may be left out.
    """

    examples = """\
examples:
  ppfleetx configs
  ppfleetx configs copy gpt/pretrain_gpt_345M_single_card my_configs
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Engine.max_steps=100
"""
    words: tuple[str, ...] = positional(
        "copy NAME DIR", "copy a configuration and its bases; nothing is overwritten", default=()
    )

    def run(self) -> None:
        if not self.words:
            print(table())
            return
        if len(self.words) != 3 or self.words[0] != "copy":
            raise ConfigError("expected no arguments, or: copy NAME DIR")
        from ppfleetx.config.shipped import copy_config

        written = copy_config(self.words[1], Path(self.words[2]))
        print(f"copied: {', '.join(map(str, written))}" if written else f"already there: {self.words[2]}")


def table() -> str:
    """Return a table of the shipped configurations: name, number of parameters, number of cards, purpose."""
    from ppfleetx.commands.check import human_count
    from ppfleetx.config.loader import load_config
    from ppfleetx.config.shipped import purpose, shipped_configs
    from ppfleetx.models.gpt.spec import parameter_count

    rows = [("NAME", "SIZE", "CARDS", "PURPOSE")]
    for name, path in shipped_configs().items():
        cfg = load_config(path)
        cards = str(cfg.plan.world_size)
        if "Distributed.dp_degree" in cfg.derived:  # dp_degree follows the number of processes
            cards = "any" if cards == "1" else f"{cards} x n"
        rows.append((name, human_count(parameter_count(cfg.Model)), cards, purpose(path)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


_BASH = """\
_{name}() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _{name} {name}
"""


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print a script that lets bash or zsh complete the verbs and options of ppfleetx."""

    examples = """\
examples:
  source <(ppfleetx completion bash)     in ~/.bashrc
  source <(ppfleetx completion zsh)      in ~/.zshrc, after compinit
"""
    shell: Literal["bash", "zsh"] = positional(None, "which shell the script is for", default=MISSING)

    def run(self) -> None:
        """Print the script. For zsh, a line that loads ``bashcompinit`` comes before the bash script."""
        head = "autoload -U +X bashcompinit && bashcompinit\n" if self.shell == "zsh" else ""
        print(head + bash_script(), end="")


def bash_script() -> str:
    """Return a bash script that completes all verbs and options."""
    cases = "\n".join(f'        {name}) words="{" ".join(_words(name))}" ;;' for name in sorted(VERBS))
    return _BASH.format(name=PROGRAM, verbs=" ".join(sorted(VERBS)), cases=cases)


def _words(verb: str) -> list[str]:
    words: list[str] = []
    for action in VERBS[verb].command().parser()._actions:
        words += action.option_strings or [str(choice) for choice in action.choices or ()]
    return words
