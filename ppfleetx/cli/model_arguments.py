"""What the verbs that use a trained model share: a checkpoint that speaks for itself, or ``-c FILE``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.cli import add_config_arguments

if TYPE_CHECKING:
    from ppfleetx.config.loader import ConfigSource

CHECKPOINT_HELP = (
    "a run's directory, one of its checkpoints, a directory of Hugging Face or FleetX, or hf:ORG/NAME, which "
    "is downloaded from the Hugging Face hub; it needs nothing else. Without it: -c FILE, which names the "
    "checkpoint in Engine.save_load.ckpt_dir"
)


@dataclass(frozen=True)
class Job:
    """What a program takes: the configuration's file, and overrides in their order."""

    config: ConfigSource
    overrides: list[str]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CHECKPOINT, ``-c FILE`` and ``-o Section.key=value``."""
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    add_config_arguments(parser, required=False)


@contextmanager
def job_of(
    args: argparse.Namespace, *more: str, key: str = "Engine.save_load.ckpt_dir", option: str = "CHECKPOINT"
) -> Iterator[Job]:
    """The configuration and overrides that the arguments mean; what was made for them is removed behind.

    Args:
        args: of :func:`add_model_arguments`.
        more: overrides that other arguments stand for.
        key: what is to name the checkpoint.
        option: how the checkpoint is given, for the message.

    Raises:
        UserError: neither is given, or there is no model in the directory.
    """
    if args.checkpoint is None and args.config is None:
        raise ConfigError(f"give {option}, the directory of a model, or -c FILE")
    if args.checkpoint is None:
        yield Job(args.config, [*args.override, *more])
        return
    from ppfleetx.commands.resolve_model import resolve_model

    with ExitStack() as stack:
        place = resolve_model(args.checkpoint, stack, with_config=args.config is None)
        overrides = place.overrides([*args.override, *more], option=option, key=key)
        yield Job(args.config or place.config, overrides)
