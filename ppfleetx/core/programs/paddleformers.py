"""What ``projects/paddleformers/run_pretrain.py`` does: PaddleFormers' pretraining arguments, trained."""

from __future__ import annotations

from collections.abc import Sequence

from ppfleetx.core.programs.megatron import own_arguments, train_translated
from ppfleetx.dialects.paddleformers.dialect import of_arguments

USAGE = """\
usage: run_pretrain.py FILE.yaml [--name value ...]   a YAML or JSON file; arguments replace its values
       run_pretrain.py --name value ...
       run_pretrain.py --check [--world-size N] ...      print plan, parameters and batches, and run nothing
docs/dialects/paddleformers.md lists the arguments.
"""


def run(argv: Sequence[str]) -> None:
    """The program ``run_pretrain.py``.

    Args:
        argv: its arguments.

    Raises:
        UserError: anything wrong with them, with the file, or with what that names.
    """
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return
    checks, world, rest = own_arguments(argv)
    train_translated(of_arguments(rest, world), world, only_checks=checks)
