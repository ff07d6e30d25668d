"""The command ``ppfleetx VERB ...``, which the scripts in ``tools/`` also call.

To add a verb, write a :class:`~ppfleetx.commands.options.Command` and add it to :data:`GROUPS`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ppfleetx import __version__
from ppfleetx.commands.options import import_plugins, imported
from ppfleetx.utils.exit_codes import EXIT_USER_ERROR, run_tool

if TYPE_CHECKING:
    from ppfleetx.commands.options import Command


@dataclass(frozen=True)
class Verb:
    """One verb (subcommand) of ``ppfleetx``.

    Attributes:
        name: the word after ``ppfleetx``.
        place: module and name of the verb's class, such as ``train_verbs:Train``.
        help: the description in the list of verbs.
    """

    name: str
    place: str
    help: str

    def command(self) -> type[Command]:
        """Import and return the verb's class, a :class:`~ppfleetx.commands.options.Command`."""
        return imported(self.place)


GROUPS: dict[str, tuple[Verb, ...]] = {
    "train": (
        Verb("train", "train_verbs:Train", "pretrain or finetune the model of a configuration"),
        Verb("finetune", "train_verbs:Finetune", "train from the weights of another run or model"),
        Verb("supervise", "train_verbs:Supervise", "run a training command and start it again when it fails"),
        Verb("hang-report", "train_verbs:HangReport", "say why a job hung, from its ranks' reports"),
        Verb("doctor", "doctor:Doctor", "look at machine, network, data and devices before a job starts"),
        Verb("check", "train_verbs:Check", "look at a configuration: plan, parameters, batch arithmetic"),
        Verb("plan", "train_verbs:Plan", "predict memory and step time, or rank plans for a number of cards"),
        Verb("recipe", "train_verbs:Recipe", "write a whole configuration from the depth of the model"),
        Verb(
            "translate",
            "train_verbs:Translate",
            "print another toolkit's configuration or command line as ours",
        ),
        Verb("index", "corpus_verbs:Index", "build the index maps of a configuration ahead of a run"),
        Verb("compare", "loss_compare:Compare", "compare the losses of two runs"),
        Verb("plot", "loss_curves:Plot", "draw the loss curves of a run"),
        Verb("report", "train_verbs:Report", "describe a run on one page: curves, samples, speed, cost"),
    ),
    "use a model": (
        Verb("generate", "model_verbs:Generate", "continue prompts with a checkpoint"),
        Verb("chat", "model_verbs:Chat", "talk with a model"),
        Verb("eval", "model_verbs:Evaluate", "loss and perplexity of a checkpoint, or a classifier's scores"),
        Verb("lm-eval", "model_verbs:LmEval", "tasks of lm-evaluation-harness"),
        Verb("export", "deploy_verbs:Export", "export a checkpoint as a program that generates by itself"),
        Verb("infer", "model_verbs:Infer", "continue prompts with an exported model"),
        Verb("serve", "deploy_verbs:Serve", "serve a checkpoint over HTTP"),
    ),
    "checkpoints": (
        Verb("inspect", "inspect_checkpoint:Inspect", "show a checkpoint, verify its checksums, compare two"),
        Verb(
            "convert", "convert:Convert", "convert checkpoints: Hugging Face, FleetX, Megatron-LM, ppfleetx"
        ),
        Verb("quantize", "checkpoint_verbs:Quantize", "store the weights of a checkpoint in 8 or 4 bits"),
        Verb("prune", "checkpoint_verbs:Prune", "take heads, units and layers out of a checkpoint"),
        Verb("upcycle", "checkpoint_verbs:Upcycle", "make a mixture of experts from a dense model"),
        Verb("merge", "convert:Merge", "add trained adapters to the weights they belong to"),
    ),
    "data": (
        Verb("tokenizer", "train_tokenizer:TrainTokenizer", "train a tokenizer on text"),
        Verb("prepare", "prepare:Prepare", "encode text to .bin/.idx"),
        Verb("inspect-data", "corpus_verbs:InspectData", "show a corpus, or verify its checksums"),
        Verb("merge-data", "corpus_verbs:MergeData", "write several corpora as one"),
        Verb("convert-data", "corpus_verbs:ConvertData", "write a corpus of FleetX as .bin/.idx"),
        Verb(
            "stdlib-corpus",
            "corpus_verbs:StdlibCorpus",
            "this Python's own sources as a corpus to try things with",
        ),
    ),
    "the command itself": (
        Verb("configs", "configs:Configs", "list the configurations that ship, or copy one"),
        Verb(
            "completion", "completion:Completion", "print a script that completes this command in bash or zsh"
        ),
    ),
}
"""The verbs in groups, as ``ppfleetx --help`` lists them."""

VERBS: dict[str, Verb] = {verb.name: verb for verbs in GROUPS.values() for verb in verbs}


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
    """Run the command ``ppfleetx``. This is the entry point of the console script."""
    run_tool(partial(_call, sys.argv[1:]))


def run_program(verb: str) -> None:
    """Run a verb (subcommand) with the arguments of this process, and end the process with its exit code. The
    scripts in ``tools/`` use this."""
    run_tool(partial(call, verb, program=None))


def run_function(place: str, *arguments: object, **options: object) -> None:
    """Call a function, given as ``module:name`` within ``ppfleetx.commands``, and end this process with its
    exit code. The programs in ``projects/`` use this."""
    run_tool(lambda: imported(place)(*arguments, **options))


def call(verb: str, arguments: Sequence[str] | None = None, *, program: str | None = PROGRAM) -> int | None:
    """Run a verb (subcommand) in this process and return its exit code.

    Args:
        arguments: the arguments after the verb; None: the arguments of this process.
        program: the program's name in messages; None: the name of the script that runs.

    Raises:
        UserError: the user made a mistake, such as naming a file that does not exist.
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
    width = max(map(len, VERBS)) + 2
    lines = [_HEAD]
    for title, verbs in GROUPS.items():
        lines += [f"{title}:", *(f"  {verb.name:{width}}{verb.help}" for verb in verbs), ""]
    return "\n".join([*lines, _EXAMPLES.rstrip()])
