"""Implement ``ppfleetx completion``, which prints a completion script for a shell."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from ppfleetx.commands.main import PROGRAM, VERBS
from ppfleetx.commands.options import Command, positional

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
