"""Add the adapters of a checkpoint trained with Model.lora to its weights: a plain checkpoint."""

from __future__ import annotations

import argparse

from ppfleetx.utils.cli import add_plugin_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--input", required=True, metavar="DIR", help="checkpoint with adapters")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new or empty directory")
    parser.add_argument(
        "--base", metavar="DIR", help="the frozen weights, for adapters saved alone (Model.lora.base)"
    )
    add_plugin_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Merge, and say where the result is."""
    from ppfleetx.checkpoint.merge_lora import merge_lora
    from ppfleetx.utils.log import configure_logging
    from ppfleetx.utils.plugins import import_named_plugins

    import_named_plugins()  # what the environment names; --plugin has imported its own
    configure_logging()
    print(f"written: {merge_lora(args.input, args.output, args.base)}")
