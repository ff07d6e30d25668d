"""Take attention heads, feed-forward units and layers out of a checkpoint: a smaller model of the same kind.

CHECKPOINT is the directory of a run, of one of its checkpoints, of Hugging Face or of FleetX. Every layer
loses the same number of heads and units, so that the result is an ordinary model: it trains, generates,
converts and exports under any plan. Training it a little makes up for most of the loss (docs/compress.md).
"""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_config_arguments

EXAMPLES = """\
examples:
  ppfleetx prune output --ratio 0.25 --output output-pruned
  ppfleetx prune output --ratio 0.25 --criterion saliency --calibration data/train --output output-pruned
  ppfleetx prune output --drop-layers 9 10 --output output-shallow
  ppfleetx finetune --from output-pruned --output recovered
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the directory of a model")
    add_config_arguments(parser, required=False)
    parser.add_argument("--output", required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="share of the heads and units taken out of each layer, rounded to fewer (default 0)",
    )
    parser.add_argument(
        "--criterion",
        choices=("l1_norm", "l2_norm", "saliency"),
        default="l1_norm",
        help="what matters least: weights with the smallest sum of magnitudes (default) or squares, or what "
        "the loss would miss least (saliency)",
    )
    parser.add_argument(
        "--part", choices=("heads", "mlp", "both"), default="both", help="what is pruned (default both)"
    )
    parser.add_argument(
        "--multiple",
        type=int,
        default=1,
        metavar="N",
        help="what stays is rounded up to a multiple of N, such as a tensor-parallel degree (default 1)",
    )
    parser.add_argument(
        "--drop-layers", type=int, nargs="+", default=[], metavar="I", help="layers to leave out, from 0"
    )
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help="for saliency: a corpus (prefix of .bin/.idx) or a .txt file",
    )
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N", help="windows to calibrate on (default 64)"
    )


def run(args: argparse.Namespace) -> None:
    """Prune, and print the sizes before and after."""
    from ppfleetx.commands.prune import Request, run

    run(
        Request(
            checkpoint=args.checkpoint,
            output=args.output,
            ratio=args.ratio,
            criterion=args.criterion,
            part=args.part,
            multiple=args.multiple,
            drop_layers=tuple(args.drop_layers),
            calibration=args.calibration,
            samples=args.samples,
            config=args.config,
            override=tuple(args.override),
        )
    )
