"""Implement ``run_pretrain.py`` in ``projects/paddleformers``, with the arguments of PaddleFormers."""

from __future__ import annotations

from collections.abc import Sequence

from ppfleetx.commands.megatron_programs import train_translated
from ppfleetx.dialects.paddleformers.dialect import of_arguments

USAGE = """\
usage: run_pretrain.py FILE.yaml [--name value ...]   a YAML or JSON file; arguments replace its values
       run_pretrain.py --name value ...
       run_pretrain.py --check [--world-size N] ...      print plan, parameters and batches, and run nothing
docs/dialects/paddleformers.md lists the arguments.
"""


def run(argv: Sequence[str]) -> None:
    """Run ``projects/paddleformers/run_pretrain.py``: train with the arguments of PaddleFormers."""
    train_translated(argv or ["--help"], USAGE, of_arguments)
