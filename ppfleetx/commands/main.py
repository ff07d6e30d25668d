"""The command ``ppfleetx VERB ...``, which is ``python -m ppfleetx VERB ...``, and the scripts in ``tools/``.

Modules are imported only for the verb in use, so that the command itself starts at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from functools import partial

from ppfleetx import __version__
from ppfleetx.commands.options import import_plugins
from ppfleetx.commands.verbs import GROUPS, VERBS
from ppfleetx.utils.cli import EXIT_USER_ERROR, run_tool

PROGRAM = "ppfleetx"

_HEAD = f"""\
usage: {PROGRAM} VERB ...
       {PROGRAM} VERB --help

Pretrain, finetune, evaluate, generate with, export and serve GPT models on PaddlePaddle.
"""
_EXAMPLES = f"""\
examples:
  {PROGRAM} check -c gpt/pretrain_gpt_345M_single_card
  {PROGRAM} train -c FILE -o Engine.max_steps=100
  {PROGRAM} generate -c FILE -o Engine.save_load.ckpt_dir=DIR -o 'Generation.prompt=Once upon a time'
"""


def main() -> None:
    """The entry point of the console script."""
    run_tool(partial(_call, sys.argv[1:]))


def run_program(verb: str, arguments: Sequence[str] | None = None, *, program: str | None = None) -> None:
    """Run :func:`call` as the whole program, as the scripts of ``tools/`` do. Does not return."""
    run_tool(partial(call, verb, arguments, program=program))


def call(verb: str, arguments: Sequence[str] | None = None, *, program: str | None = PROGRAM) -> int | None:
    """Run a verb in this process and return its exit code.

    Args:
        arguments: the arguments after the verb; None: the arguments of this process.
        program: the name before the verb in messages; None: the name of this process's program, without the
            verb.

    Raises:
        UserError: a mistake of the user.
        SystemExit: the arguments are wrong, or contain ``--help``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = VERBS[verb].command().parse(arguments, None if program is None else f"{program} {verb}")
    import_plugins(options)
    if getattr(options, "is_launched", False):
        return options.launch(verb, arguments)
    return options.run()


def _call(arguments: Sequence[str]) -> int | None:
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    word = arguments[0] if arguments else "--help"
    if word in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USER_ERROR
    if word == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if word not in VERBS:
        near = difflib.get_close_matches(word, VERBS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        print(f"error: there is no verb {word!r}: {hint}`{PROGRAM} --help` lists all", file=sys.stderr)
        return EXIT_USER_ERROR
    return call(word, arguments[1:])


def usage() -> str:
    """The text that ``ppfleetx --help`` prints."""
    width = max(map(len, VERBS)) + 2
    lines = [_HEAD]
    for title, verbs in GROUPS.items():
        lines += [f"{title}:", *(f"  {verb.name:{width}}{verb.help}" for verb in verbs), ""]
    return "\n".join([*lines, _EXAMPLES.rstrip()])
