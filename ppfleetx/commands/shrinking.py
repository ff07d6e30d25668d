"""What the two programs that make a checkpoint smaller, pruning and quantisation, ask of their input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ppfleetx.checkpoint.weights_only import load_tokenizer
from ppfleetx.commands.replicas import as_replicas
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.files import is_taken

if TYPE_CHECKING:
    from ppfleetx.compress.samples import Samples
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_LONGEST = 512  # tokens of a window


class Shrinking(Protocol):
    """The options that both commands have."""

    @property
    def checkpoint(self) -> str: ...
    @property
    def config(self) -> str | None: ...
    @property
    def override(self) -> tuple[str, ...]: ...
    @property
    def calibration(self) -> str | None: ...
    @property
    def samples(self) -> int: ...


def check_request(request: Shrinking, output: Path) -> None:
    """Refuse an output that holds something, and a calibration of no samples."""
    if is_taken(output):
        raise ConfigError(
            "is there already; name a new or empty directory", key="--output", value=str(output)
        )
    if request.samples < 1:
        raise ConfigError("must be at least 1", key="--samples", value=request.samples)


@contextmanager
def open_model(request: Shrinking) -> Iterator[tuple[RunConfig, Path, Tokenizer | None]]:
    """Configuration for one process, directory of the checkpoint, and tokenizer where there is one."""
    with ExitStack() as stack:
        place = resolve_model(request.checkpoint, stack, with_config=request.config is None)
        cfg = load_config(request.config or place.config, place.overrides(request.override))
        cfg, _ = as_replicas(cfg, 1)
        tokenizer = None if place.tokenizer is None else load_tokenizer(place.tokenizer)
        yield cfg, place.checkpoint, tokenizer


def refuse_adapters(cfg: RunConfig, place: str) -> None:
    """Raise CheckpointError where adapters lie beside the weights."""
    if cfg.Model.lora is not None:
        raise CheckpointError(
            f"{place} has adapters (Model.lora); add them to the weights first: "
            f"ppfleetx merge --input {place} --output MERGED"
        )


def calibration_samples(
    cfg: RunConfig, request: Shrinking, tokenizer: Tokenizer | None, fewest: int
) -> Samples | None:
    """Windows of the calibration data, at least `fewest` tokens; None where none was named."""
    if request.calibration is None:
        return None
    from ppfleetx.compress.samples import read_samples

    return read_samples(
        request.calibration,
        tokenizer,
        vocab_size=cfg.Model.vocab_size,
        seq_len=min(cfg.Model.max_position_embeddings, _LONGEST),
        num_windows=request.samples,
        fewest=fewest,
    )
