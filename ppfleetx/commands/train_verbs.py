"""The verbs that train, and the verbs that examine a training job before or after it runs.

``--help`` imports only this file: each verb imports its implementation when it runs.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ppfleetx.commands.launching import TrainingOptions
from ppfleetx.commands.model_verbs import MODEL_HELP, job_of
from ppfleetx.commands.options import (
    Command,
    ConfigOptions,
    OptionalConfigOptions,
    option,
    plugin_option,
    positional,
    positive_int,
    refuse_not_positive,
    repeated,
    switch,
    whole_number,
)
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import AXES, PLAN_WORDS
from ppfleetx.planner import ANY_CARD, shipped_cards
from ppfleetx.utils.launcher_env import world_size

_RUN = "about the whole run"


@dataclass(frozen=True, kw_only=True)
class Train(TrainingOptions, ConfigOptions):
    """Pretrain or finetune the model of a YAML configuration."""

    examples = """\
examples:
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Data.Train.dataset.input_dir=data/my_text_document
  ppfleetx train -c FILE --nproc 8
  ppfleetx train -c FILE --max-steps 2000
  ppfleetx train -c FILE --nproc 8 --nnodes 2 --master 10.0.0.1:8765
"""
    check: bool = switch("validate the configuration, print plan, parameters and batch arithmetic, and exit")

    @property
    def is_launched(self) -> bool:
        """Whether to run the verb (subcommand) in several processes. With ``--check``, the verb runs only in
        this process."""
        return not self.check and super().is_launched

    def run(self) -> None:
        from ppfleetx.commands.finetune_defaults import up_to

        overrides = [*self.override]
        if self.max_steps is not None:
            overrides += up_to(self.max_steps, self.config, overrides)
        if self.check:
            from ppfleetx.commands.check import check

            size = self.num_processes or world_size()
            check(self.config, overrides, world_size=size if size > 1 else None)
            return
        from ppfleetx.commands.initialize import initialize

        cfg, ctx = initialize(self.config, overrides, reads=("Train", "Eval"))
        from ppfleetx.commands.train import train

        train(cfg, ctx)


@dataclass(frozen=True, kw_only=True)
class Finetune(TrainingOptions, OptionalConfigOptions):
    """Start a new run from the weights of another model. The run starts at step 0 and at the first sample,
    with a new optimizer.

    The network and the data settings come from the checkpoint. Without -c FILE, a run makes 3 passes over the
    data. Each step takes 8 sequences per data-parallel rank. The learning rate is 5e-5, or 5e-4 for adapters
    (-o Model.lora.rank=8). -o changes any of these settings.
    """

    examples = """\
examples:
  ppfleetx finetune --from gpt2 --output chatty -o Data.Train.dataset.name=ChatDataset \\
      -o Data.Train.dataset.input_dir=. -o Data.Train.dataset.split=alpaca_data -o Model.lora.rank=8
  ppfleetx finetune --from output --output finetuned -o Data.Train.dataset.input_dir=data/more_text_document
  ppfleetx finetune --from gpt2 -c gpt/finetune_gpt_345M_single_card_sft
"""
    checkpoint: str = option(MODEL_HELP, "--from", default=MISSING, metavar="CHECKPOINT")
    output: str | None = option(
        "directory of the new run (default: Engine.save_load.output_dir)",
        key="Engine.save_load.output_dir",
        metavar="DIR",
    )

    def run(self) -> None:
        from ppfleetx.commands.finetune_defaults import finetuning_defaults, up_to, without_own_base
        from ppfleetx.commands.initialize import initialize

        given = [*self.override, *self.settings()]
        with job_of(
            self.checkpoint, self.config, given, key="Engine.save_load.init_from", option="--from"
        ) as job:
            overrides = without_own_base(job.config, job.overrides)
            if self.max_steps is not None:
                overrides += up_to(self.max_steps, job.config, overrides)
            if self.config is None:
                overrides += finetuning_defaults(job.config, overrides)
            cfg, ctx = initialize(job.config, overrides, reads=("Train", "Eval"))
            from ppfleetx.commands.train import train

            train(cfg, ctx)


@dataclass(frozen=True, kw_only=True)
class Check(ConfigOptions):
    """Check a configuration without running it, and print what it means: the parallel plan, parameters, batch
    sizes, token ids.

    This does not need Paddle. The exit code is 2 if a run would be refused; the message gives the reason.
    """

    examples = """\
example:
  ppfleetx check -c FILE -o Distributed.mp_degree=2
"""

    def run(self) -> None:
        from ppfleetx.commands.check import check

        check(self.config, self.override)


@dataclass(frozen=True, kw_only=True)
class Plan(ConfigOptions):
    """Predict memory and step time of a configuration under one parallel plan, or rank all plans for a number
    of cards.
    """

    devices: int | None = option(
        "number of cards, such as 16 (--card says which); without --plan, rank all plans of them",
        type=whole_number,
    )
    card: str | None = option(
        lambda: f"{', '.join(shipped_cards())}, or a YAML file (default: Global.card, else {ANY_CARD})",
        metavar="NAME",
    )
    per_node: int = option("cards per node (default: 8)", default=8, type=whole_number)
    network_gbps: float | None = option(
        "total network of a node in Gbit/s (default: the card's)", metavar="X"
    )
    rank_order: str | None = option(
        f"how ranks are numbered, nearest neighbors last (default: {','.join(AXES)}, as this engine "
        "does; another program's for its published runs)",
        metavar="pp,dp,...",
    )
    batch: int | None = option("sequences per step (default: the YAML's)", type=whole_number)
    goal: Literal["time", "memory"] = option("what the best plan minimizes (default: time)", default="time")
    plan: str | None = option(f"one plan instead of all: {', '.join(PLAN_WORDS)}", metavar="dp=4,mp=8,...")
    explain: str | None = option(
        "explain PLAN, that of --plan, or the best one in full", nargs="?", const="", metavar="PLAN"
    )
    json: bool = switch("print one JSON object instead of text")
    write: str | None = option(
        "write the configuration under the plan, or the best one, to FILE", metavar="FILE"
    )
    report: str | None = option(
        "write pictures and an HTML page of the plan, or the best one, to DIR", metavar="DIR"
    )
    calibrate: tuple[str, ...] = repeated(
        "fit the card to the step times of your run; may be given several times", metavar="RUN_DIR"
    )
    write_card: str | None = option("write the calibrated card to FILE, for --card", metavar="FILE")
    tokens: float | None = option("tokens of the run (default: by Engine.max_steps)", group=_RUN, metavar="T")
    price: float | None = option(
        "price of a card-hour: print what the run and a token cost", group=_RUN, metavar="P"
    )
    mtbf: float | None = option(
        "hours between failures of one node: print the best checkpoint interval", group=_RUN, metavar="HOURS"
    )
    save_seconds: float | None = option(
        "seconds that the job waits for one checkpoint", group=_RUN, metavar="S"
    )
    restart_seconds: float = option(
        "seconds from a failure to the next step (default: 300)", default=300.0, group=_RUN, metavar="S"
    )
    scale: str | None = option(
        "predict the plan with more replicas on these numbers of cards", group=_RUN, metavar="N,N,..."
    )
    ramp: str | None = option(
        "a batch that grows, as Megatron-LM's --rampup-batch-size", group=_RUN, metavar="START,STEP,SAMPLES"
    )

    program = "plan:run"


@dataclass(frozen=True, kw_only=True)
class Recipe(Command):
    """Write a complete training configuration, given only the depth of the model (its number of layers).

    The model's shape, the batch size, the learning rate and the length of training follow from the depth, and
    the planner chooses the parallel plan. The first lines of the file are the predicted time, memory and
    cost. docs/planner.md has the rules.
    """

    examples = """\
examples:
  ppfleetx recipe --depth 12 --cards 8xA100-80GB --write d12.yaml
  ppfleetx recipe --depth 4 --cards 2xCPU --tokens-per-param 5 --seq-len 256 --vocab-size 8192
"""
    depth: int = option("layers; the model is 64 times as wide", default=MISSING, type=whole_number)
    cards: str = option(
        f"how many cards of which kind, as for `ppfleetx plan --card` (default: 8x{ANY_CARD})",
        default=f"8x{ANY_CARD}",
        metavar="NxCARD",
    )
    per_node: int = option("cards per node (default: 8)", default=8, type=whole_number)
    tokens_per_param: float = option(
        "training tokens for each parameter (default: 20)", default=20.0, metavar="T"
    )
    seq_len: int = option("tokens of a sequence (default: 2048)", default=2048, type=whole_number)
    vocab_size: int = option("tokens of the vocabulary (default: 32768)", default=32768, type=whole_number)
    price: float | None = option("price of a card-hour, for the cost", metavar="P")
    write: str | None = option("file to write; without it the configuration is printed", metavar="FILE")

    def run(self) -> None:
        from ppfleetx.planner.recipe import RecipeInputs, recipe
        from ppfleetx.utils.output_files import atomic_write, refuse_as_new_file

        refuse_not_positive(self, "tokens_per_param", "price")
        count, _, card = self.cards.partition("x")
        devices = positive_int(count)
        if devices is None or not card:
            raise ConfigError("must be like 8xA100-80GB", key="--cards", value=self.cards)
        if self.write is not None:
            refuse_as_new_file(Path(self.write), "--write")
        inputs = RecipeInputs(self.depth, devices, card, self.tokens_per_param, self.seq_len, self.vocab_size)
        found = recipe(inputs, self.per_node)
        if self.write is None:
            print(found.yaml(self.price), end="")
            return
        with atomic_write(self.write, "w") as file:
            file.write(found.yaml(self.price))
        print("\n".join([*found.summary(self.price), f"written: {self.write}"]))


@dataclass(frozen=True, kw_only=True)
class Translate(Command):
    """Translate another toolkit's configuration or command line to a ppfleetx configuration, and print it.

    A comment on each key of the result names its source: file, line and key of the other toolkit. The toolkit
    is recognized by its keys or options. docs/dialects/ has a page for each toolkit.
    """

    examples = """\
examples:
  ppfleetx translate projects/mindformers/configs/gpt2/run_gpt2.yaml
  ppfleetx translate run_gpt2.yaml --to ours.yaml
  ppfleetx translate --to ours.yaml -- run_mindformer.py --config run_gpt2.yaml --epochs 1
"""
    words: tuple[str, ...] = positional(
        "FILE | -- ARGUMENTS",
        "a configuration, further arguments of its program after --; or a whole command line after --",
        default=(),
    )
    dialect: str | None = option("the toolkit, if it is not recognized", metavar="NAME")
    to: str | None = option("write there instead of to standard output", metavar="OUT.yaml")

    program = "translate:translate"


@dataclass(frozen=True, kw_only=True)
class Supervise(Command):
    """Run a training command. If it fails, restart it up to --max-restarts times.

        ppfleetx supervise --max-restarts 3 -- ppfleetx train -c FILE --nproc 4
        python tools/supervise.py -- python -m paddle.distributed.launch --nproc_per_node 4 \\
            tools/train.py -c FILE

    Each start gets `-o Engine.save_load.resume=auto`, unless the command sets it already, so it continues
    from the newest complete checkpoint. A restart waits until all processes of the previous start have ended.
    The command is not restarted after a mistake of the user (exit code 2) or Ctrl-C (130). SIGTERM,
    SIGHUP and Ctrl-C are passed on and also end the supervisor. No process that the command started is left
    running.
    """

    max_restarts: int = option("how often to restart at most (default: 3)", default=3)
    backoff: float = option(
        "seconds to wait before the first restart, doubled each time (default: 5)", default=5.0
    )
    grace: float = option(
        "seconds that a stopped command has to save, before SIGKILL (default: 60)", default=60.0
    )
    command: tuple[str, ...] = positional(
        None, "the command to run, after --", default=(), nargs=argparse.REMAINDER
    )

    def run(self) -> int:
        from ppfleetx.resilience.supervisor import supervise, with_resume

        command = self.command[1:] if self.command[:1] == ("--",) else self.command
        if not command:
            raise ConfigError("give the command to run after --")
        if shutil.which(command[0]) is None:
            raise ConfigError("there is no such program", key="COMMAND", value=command[0])
        for name in ("max_restarts", "backoff", "grace"):
            if not getattr(self, name) >= 0:
                key = f"--{name.replace('_', '-')}"
                raise ConfigError("must be at least 0", key=key, value=getattr(self, name))
        return supervise(
            with_resume(command), max_restarts=self.max_restarts, backoff=self.backoff, grace=self.grace
        )


@dataclass(frozen=True, kw_only=True)
class HangReport(Command):
    """Explain why a job hung, from the reports that its ranks wrote to OUTPUT_DIR/hang.

    The first line gives the cause, such as the rank that the others wait for and where that rank is. One line
    for each rank follows. If an evaluation or a generation left newer reports in OUTPUT_DIR, those are used.
    The files rank_*.txt beside the reports have each rank's last collectives and the stacks of its threads.
    """

    examples = """\
examples:
  ppfleetx hang-report output
  ppfleetx hang-report output/hang --json
"""
    directory: Path = positional("DIR", "a run's output directory, or its hang/", default=MISSING)
    json: bool = switch("print one JSON object")

    program = "hang_report:print_report"


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Describe a run on one page: curves, evaluations, samples, speed, memory, plan, data and cost.

    Reads the run's directory, and writes report.md and report.html. The run may still be training. The page
    has samples of generated text if they were written by `ppfleetx generate RUN PROMPT --output
    RUN/samples.jsonl`.
    """

    examples = """\
examples:
  ppfleetx report output
  ppfleetx report output --output page --price 1.80
"""
    directory: Path = positional("RUN", "directory of a run", default=MISSING)
    output: Path | None = option("where the page is written (default: RUN/report)", metavar="DIR")
    price: float | None = option("price of a device-hour, for the cost", metavar="P")
    plugin: tuple[str, ...] = plugin_option()

    program = "run_report:report"
