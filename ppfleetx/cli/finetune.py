"""Train a new run from the weights of another: step 0, a fresh optimizer, the data from their beginning.

The configuration is that of the checkpoint (its network, data and optimizer), changed with -o, or -c FILE.
"""

from __future__ import annotations

import argparse

from ppfleetx.cli.launching import add_launch_arguments
from ppfleetx.cli.model_arguments import CHECKPOINT_HELP, job_of
from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
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
    add_launch_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Train."""
    from ppfleetx.core.programs.launch import start_process
    from ppfleetx.core.programs.model_place import override

    more = [] if args.output is None else [override("Engine.save_load.output_dir", args.output, "--output")]
    with job_of(args, *more, key="Engine.save_load.init_from", option="--from") as job:
        cfg, ctx = start_process(job.config, job.overrides, reads=("Train", "Eval"))
        from ppfleetx.core.programs.train import train

        train(cfg, ctx)
