"""Print a configuration or a command line of another toolkit as a configuration of this one.

Each key of the result says in a comment which file, line and key of the other toolkit it came from. The
toolkit is recognised by its keys or options. docs/dialects/ has a page for each.
"""

from __future__ import annotations

import argparse

EXAMPLES = """\
examples:
  ppfleetx translate projects/mindformers/configs/gpt2/run_gpt2.yaml
  ppfleetx translate run_gpt2.yaml --to ours.yaml
  ppfleetx translate --to ours.yaml -- run_mindformer.py --config run_gpt2.yaml --epochs 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    from ppfleetx.dialects.command import add_translate_arguments

    add_translate_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print the translation, or write it."""
    from ppfleetx.dialects.command import run_translate

    print(run_translate(args))
