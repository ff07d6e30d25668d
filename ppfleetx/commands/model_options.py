"""Options of the verbs that use a trained model: a checkpoint with its own configuration, or ``-c FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ppfleetx.commands.options import OptionalConfigOptions, positional
from ppfleetx.config.errors import ConfigError, naming

if TYPE_CHECKING:
    from ppfleetx.config.loader import ConfigSource
    from ppfleetx.config.reading.overrides import Override, Setting


MODEL_HELP = (
    "a run's directory, one of its checkpoints, a directory of Hugging Face or FleetX, a GGUF file, or "
    "hf:ORG/NAME, which is downloaded from the Hugging Face hub"
)


@dataclass(frozen=True)
class Job:
    """The configuration that a command runs with."""

    config: ConfigSource
    overrides: list[Override]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionalConfigOptions):
    """CHECKPOINT, ``-c FILE`` and ``-o Section.key=value``."""

    intermixed: ClassVar[bool] = True

    checkpoint: str | None = positional(
        "CHECKPOINT",
        f"{MODEL_HELP}; it needs nothing else. Without it: -c FILE, which names the "
        "checkpoint in Engine.save_load.ckpt_dir",
    )

    def job(self, *settings: Setting) -> AbstractContextManager[Job]:
        """The configuration that the options and ``settings`` give."""
        return job_of(self.checkpoint, self.config, [*self.override, *self.settings(), *settings])


@contextmanager
def job_of(
    checkpoint: str | None,
    config: str | None,
    overrides: list[Override],
    *,
    key: str = "Engine.save_load.ckpt_dir",
    option: str = "CHECKPOINT",
) -> Iterator[Job]:
    """The configuration of a model's directory, or of ``config``; temporary files are removed at the end.

    Args:
        checkpoint: the model's directory.
        config: replaces the configuration that the model comes with.
        overrides: the user's.
        key: what is to name the checkpoint.
        option: how the checkpoint is given, for the message.

    Raises:
        UserError: neither is given, or there is no model in the directory.
    """
    if checkpoint is None and config is None:
        raise ConfigError(f"give {option}, the directory of a model, or -c FILE")
    if checkpoint is None:
        yield Job(config, overrides)
        return
    from ppfleetx.commands.resolve_model import resolve_model

    with ExitStack() as stack:
        with naming(option, checkpoint):
            place = resolve_model(checkpoint, stack, with_config=config is None)
        yield Job(config or place.config, place.overrides(overrides, option=option, key=key))
