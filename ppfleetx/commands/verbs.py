"""The verbs of the command ``ppfleetx``: one table. Nothing slow is imported here.

To add a verb, write a :class:`~ppfleetx.commands.options.Command` and add a line.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppfleetx.commands.options import Command


@dataclass(frozen=True)
class Verb:
    """One row of the table: a verb and its class.

    Attributes:
        name: the verb as typed.
        place: the module of ``ppfleetx.commands`` and the class in it, e.g. ``train:Train``.
        help: a one-line description for the list of verbs.
    """

    name: str
    place: str
    help: str

    def command(self) -> type[Command]:
        """The verb's class, whose fields are its options."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(f"ppfleetx.commands.{module}"), name)


GROUPS: dict[str, tuple[Verb, ...]] = {
    "train": (
        Verb("train", "train_verbs:Train", "pretrain or finetune the model of a configuration"),
        Verb("finetune", "train_verbs:Finetune", "train from the weights of another run or model"),
        Verb("supervise", "train_verbs:Supervise", "run a training command and start it again when it fails"),
        Verb("hang-report", "train_verbs:HangReport", "say why a job hung, from its ranks' reports"),
        Verb("doctor", "doctor:Doctor", "look at machine, network, data and devices before a job starts"),
        Verb("check", "train_verbs:Check", "look at a configuration: plan, parameters, batch arithmetic"),
        Verb("plan", "train_verbs:Plan", "predict memory and step time, or rank the plans of so many cards"),
        Verb("recipe", "train_verbs:Recipe", "write a whole configuration from the depth of the model"),
        Verb(
            "translate",
            "train_verbs:Translate",
            "print another toolkit's configuration or command line as ours",
        ),
        Verb("index", "corpora:Index", "build the index maps of a configuration ahead of a run"),
        Verb("compare", "compare:Compare", "compare the losses of two runs"),
        Verb("plot", "compare:Plot", "draw the loss curves of a run"),
        Verb("report", "train_verbs:Report", "describe a run on one page: curves, samples, speed, cost"),
    ),
    "use a model": (
        Verb("generate", "model_verbs:Generate", "continue prompts with a checkpoint"),
        Verb("chat", "model_verbs:Chat", "talk with a model"),
        Verb("eval", "model_verbs:Evaluate", "loss and perplexity of a checkpoint, or a classifier's scores"),
        Verb("lm-eval", "model_verbs:LmEval", "tasks of lm-evaluation-harness"),
        Verb("export", "serving:Export", "export a checkpoint as a program that generates by itself"),
        Verb("infer", "model_verbs:Infer", "continue prompts with an exported model"),
        Verb("serve", "serving:Serve", "serve a checkpoint over HTTP"),
    ),
    "checkpoints": (
        Verb("inspect", "inspect_checkpoint:Inspect", "show a checkpoint, verify its checksums, compare two"),
        Verb(
            "convert", "convert:Convert", "convert checkpoints: Hugging Face, FleetX, Megatron-LM, ppfleetx"
        ),
        Verb("quantize", "checkpoint_verbs:Quantize", "store the weights of a checkpoint in 8 or 4 bits"),
        Verb("prune", "checkpoint_verbs:Prune", "take heads, units and layers out of a checkpoint"),
        Verb("upcycle", "checkpoint_verbs:Upcycle", "make a mixture of experts of a dense model"),
        Verb("merge", "convert:Merge", "add trained adapters to the weights they belong to"),
    ),
    "data": (
        Verb("tokenizer", "prepare:TrainTokenizer", "train a tokenizer on text"),
        Verb("prepare", "prepare:Prepare", "encode text to .bin/.idx"),
        Verb("inspect-data", "corpora:InspectData", "show a corpus, or verify its checksums"),
        Verb("merge-data", "corpora:MergeData", "write several corpora as one"),
        Verb("convert-data", "corpora:ConvertData", "write a corpus of FleetX as .bin/.idx"),
        Verb(
            "stdlib-corpus",
            "corpora:StdlibCorpus",
            "this Python's own sources as a corpus to try things with",
        ),
    ),
    "the command itself": (
        Verb("configs", "configs:Configs", "list the configurations that ship, or copy one"),
        Verb("completion", "configs:Completion", "print a script that completes this command in bash or zsh"),
    ),
}
"""The verbs as ``ppfleetx --help`` lists them."""

VERBS: dict[str, Verb] = {verb.name: verb for verbs in GROUPS.values() for verb in verbs}
