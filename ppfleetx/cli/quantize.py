"""Store the weights of a checkpoint in 8 or 4 bits.

CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. The result is a
checkpoint that generates, evaluates, serves and exports like any other, under any plan, and is not trained.
The word embedding and the head have 8 bits whatever the others have.
"""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx quantize output --to int8 --output output-int8
  ppfleetx quantize output --to int4 --method gptq --calibration data/train --output output-int4
  ppfleetx quantize output --to int8 --smooth --calibration data/train --output output-w8a8
  ppfleetx quantize output-of-qat --to int8 --activations int8 --output output-int8
  ppfleetx generate output-int8 "Once upon a time"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory of a model")
    add_config_arguments(parser, required=False)
    parser.add_argument("--output", required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--to",
        required=True,
        choices=("int8", "int4"),
        help="bits of the weights; 8 with a scale for each output channel, 4 with one for each group",
    )
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="input features of a group, a multiple of 8 (int4; default: the largest of 128, 64, 32, 16 and "
        "8 that divides those of all layers)",
    )
    parser.add_argument(
        "--method",
        choices=("rtn", "gptq"),
        default="rtn",
        help="round to the nearest (default), or let later weights make up for the error (GPTQ)",
    )
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help="a corpus (prefix of .bin/.idx) or a .txt file; its last tenth measures the perplexity",
    )
    parser.add_argument(
        "--smooth",
        action="store_true",
        help="8 bits for activations too, after their outliers were moved into the weights (SmoothQuant)",
    )
    parser.add_argument(
        "--activations",
        choices=("int8",),
        help="8 bits for activations, as --smooth gives them, but weights stay where they are: for a "
        "model that was trained with quantisation",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave layers as they are, by canonical name: head, embedding.*, '*.mlp.fc2'; may be repeated",
    )
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N", help="windows to calibrate on (default 64)"
    )


def run(args: argparse.Namespace) -> None:
    """Quantise, and print what that did to each layer."""
    from ppfleetx.commands.quantize import Request, run

    run(
        Request(
            checkpoint=args.checkpoint,
            output=args.output,
            to=args.to,
            group=args.group,
            method=args.method,
            calibration=args.calibration,
            smooth=args.smooth,
            activations=args.activations,
            skip=tuple(args.skip),
            samples=args.samples,
            config=args.config,
            override=tuple(args.override),
        )
    )
