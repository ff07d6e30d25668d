"""Train a new run from the weights of another: step 0, a fresh optimizer, the data from their beginning.

Network and data are those of the checkpoint. Without -c FILE a run takes 3 passes over the data, 8 sequences
a step, and a learning rate of 5e-5, or of 5e-4 for adapters (-o Model.lora.rank=8); -o changes all of it.
"""

from __future__ import annotations

import argparse

from ppfleetx.cli.launching import add_launch_arguments, add_max_steps
from ppfleetx.cli.model_arguments import CHECKPOINT_HELP, job_of
from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx finetune --from gpt2 --output chatty -o Data.Train.dataset.name=ChatDataset \\
      -o Data.Train.dataset.input_dir=. -o Data.Train.dataset.split=alpaca_data -o Model.lora.rank=8
  ppfleetx finetune --from output --output finetuned -o Data.Train.dataset.input_dir=data/more_text_document
  ppfleetx finetune --from gpt2 -c gpt/finetune_gpt_345M_single_card_sft
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument(
        "--from", dest="checkpoint", required=True, metavar="CHECKPOINT", help=CHECKPOINT_HELP.split(";")[0]
    )
    add_config_arguments(parser, required=False)
    parser.add_argument("--output", metavar="DIR", help="of the new run (Engine.save_load.output_dir)")
    add_max_steps(parser)
    add_launch_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Train."""
    from ppfleetx.commands.finetune import finetuning_defaults, up_to
    from ppfleetx.commands.resolve_model import override
    from ppfleetx.commands.start_process import start_process

    more = [] if args.output is None else [override("Engine.save_load.output_dir", args.output, "--output")]
    with job_of(args, *more, key="Engine.save_load.init_from", option="--from") as job:
        overrides = job.overrides
        if args.max_steps is not None:
            overrides = [*overrides, *up_to(args.max_steps, job.config, overrides)]
        if args.config is None:
            overrides = [*overrides, *finetuning_defaults(job.config, overrides)]
        cfg, ctx = start_process(job.config, overrides, reads=("Train", "Eval"))
        from ppfleetx.commands.training import train

        train(cfg, ctx)
