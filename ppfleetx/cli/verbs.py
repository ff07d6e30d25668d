"""The verbs of the command ``ppfleetx``: one table. Nothing slow is imported here.

A verb is a module of ``ppfleetx/cli/`` with

- a docstring: what ``ppfleetx VERB --help`` says first,
- ``EXAMPLES`` (optional): commands that can be pasted, shown last,
- ``INTERMIXED = True`` (optional): options may stand between positional arguments,
- ``add_arguments(parser)``: its arguments,
- ``run(args)``: does it; gives the exit code, None for 0,
- ``launching(args, arguments, start)`` (optional): is called instead of ``start()``, which starts the ranks
  that ``--nproc`` asks for, and calls it.

A mistake of the user is a ``UserError``; ``ppfleetx/utils/cli.py`` makes a message and an exit code of it.
To add a verb, write the module and add a line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        name: as typed.
        module: of ``ppfleetx.cli``.
        help: one line for the list of verbs.
    """

    name: str
    module: str
    help: str


GROUPS: dict[str, tuple[Verb, ...]] = {
    "train": (
        Verb("train", "train", "pretrain or finetune the model of a configuration"),
        Verb("finetune", "finetune", "train from the weights of another run or model"),
        Verb("supervise", "supervise", "run a training command and start it again when it fails"),
        Verb("hang-report", "hang_report", "say why a job came to a halt, from its ranks' reports"),
        Verb("doctor", "doctor", "look at machine, network, data and devices before a job starts"),
        Verb("check", "check", "look at a configuration: plan, parameters, batch arithmetic"),
        Verb("plan", "plan", "predict memory and step time, or rank the plans of so many cards"),
        Verb("translate", "translate", "print another toolkit's configuration or command line as ours"),
        Verb("index", "index", "build the index maps of a configuration ahead of a run"),
        Verb("compare", "compare", "compare the losses of two runs"),
        Verb("plot", "plot", "draw the loss curves of a run"),
    ),
    "use a model": (
        Verb("generate", "generate", "continue prompts with a checkpoint"),
        Verb("chat", "chat", "talk with a model"),
        Verb("eval", "evaluate", "loss and perplexity of a checkpoint, or a classifier's scores"),
        Verb("lm-eval", "lm_eval", "tasks of lm-evaluation-harness"),
        Verb("export", "export", "export a checkpoint as a program that generates by itself"),
        Verb("infer", "infer", "continue prompts with an exported model"),
        Verb("serve", "serve", "serve a checkpoint over HTTP"),
    ),
    "checkpoints": (
        Verb("inspect", "inspect_checkpoint", "show a checkpoint, verify its checksums, compare two"),
        Verb("convert", "convert", "convert checkpoints: Hugging Face, FleetX, Megatron-LM, ppfleetx"),
        Verb("quantize", "quantize", "store the weights of a checkpoint in 8 or 4 bits"),
        Verb("prune", "prune", "take heads, units and layers out of a checkpoint"),
        Verb("merge", "merge_lora", "add trained adapters to the weights they belong to"),
    ),
    "data": (
        Verb("tokenizer", "tokenizer", "train a tokenizer on text"),
        Verb("prepare", "prepare", "encode text to .bin/.idx"),
        Verb("inspect-data", "inspect_corpus", "show a corpus, or verify its checksums"),
        Verb("merge-data", "merge_data", "write several corpora as one"),
        Verb("convert-data", "convert_data", "write a corpus of FleetX as .bin/.idx"),
        Verb("stdlib-corpus", "stdlib_corpus", "this Python's own sources as a corpus to try things with"),
    ),
    "the command itself": (
        Verb("configs", "configs", "list the configurations that ship, or copy one"),
        Verb("completion", "completion", "print a script that completes this command in bash or zsh"),
    ),
}
"""The verbs as ``ppfleetx --help`` lists them."""

VERBS: dict[str, Verb] = {verb.name: verb for verbs in GROUPS.values() for verb in verbs}
