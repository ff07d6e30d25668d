"""Pretrain or finetune the model of a YAML configuration."""

from __future__ import annotations

import argparse

from ppfleetx.cli import check
from ppfleetx.cli.launching import add_launch_arguments, add_max_steps
from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx train -c gpt/pretrain_gpt_345M_single_card -o Data.Train.dataset.input_dir=data/my_text_document
  ppfleetx train -c FILE --nproc 8
  ppfleetx train -c FILE --max-steps 2000
  ppfleetx train -c FILE --nproc 8 --nnodes 2 --master 10.0.0.1:8765
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_config_arguments(parser)
    add_max_steps(parser)
    add_launch_arguments(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="validate the configuration, print plan, parameters and batch arithmetic, and exit",
    )


def run(args: argparse.Namespace) -> None:
    """Train, or with ``--check`` only look at the configuration."""
    from ppfleetx.commands.finetune import up_to

    if args.max_steps is not None:
        args.override = [*args.override, *up_to(args.max_steps, args.config, args.override)]
    if args.check:
        check.run(args)
        return
    from ppfleetx.commands.start_process import start_process

    cfg, ctx = start_process(args.config, args.override, reads=("Train", "Eval"))
    from ppfleetx.commands.training import train

    train(cfg, ctx)
