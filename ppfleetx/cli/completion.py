"""Print a script that completes the command's verbs and options in bash or zsh."""

from __future__ import annotations

import argparse
import importlib

from ppfleetx.cli.main import PROGRAM, parser_of
from ppfleetx.cli.verbs import VERBS

EXAMPLES = """\
examples:
  source <(ppfleetx completion bash)     in ~/.bashrc
  source <(ppfleetx completion zsh)      in ~/.zshrc, after compinit
"""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("shell", choices=["bash", "zsh"], help="which shell the script is for")


def run(args: argparse.Namespace) -> None:
    """Print the script; zsh reads bash's by means of its own bashcompinit."""
    head = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    print(head + bash_script(), end="")


def bash_script() -> str:
    """The script, with what the verbs take now."""
    cases = "\n".join(f'        {name}) words="{" ".join(_words(name))}" ;;' for name in sorted(VERBS))
    return _BASH.format(name=PROGRAM, verbs=" ".join(sorted(VERBS)), cases=cases)


def _words(verb: str) -> list[str]:
    """Options of a verb, and what its positional arguments may be where they are a choice."""
    module = importlib.import_module(f"ppfleetx.cli.{VERBS[verb].module}")
    words: list[str] = []
    for action in parser_of(module)._actions:
        words += action.option_strings or [str(choice) for choice in action.choices or ()]
    return words
