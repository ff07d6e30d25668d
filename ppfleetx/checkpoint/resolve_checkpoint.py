"""Find and open the checkpoint that a path refers to, and list the checkpoints in an output directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ppfleetx.checkpoint import foreign_formats
from ppfleetx.checkpoint.manifest import (
    BEST_FILE,
    LATEST_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    is_rank_directory,
    parse_step_directory,
    read_sealed,
)
from ppfleetx.checkpoint.reader import Checkpoint, open_checkpoint, read_marker
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.log import get_logger


def named_checkpoint(cfg: RunConfig) -> str:
    """Return the value of the key ``Engine.save_load.ckpt_dir``, a path. Raises ConfigError if it is null."""
    if cfg.Engine.save_load.ckpt_dir is None:
        raise ConfigError(
            "names no checkpoint; give -o Engine.save_load.ckpt_dir=DIR (a step directory or an output "
            "directory of a training run)",
            key="Engine.save_load.ckpt_dir",
        )
    return cfg.Engine.save_load.ckpt_dir


@os_errors(CheckpointError)
def resolve_checkpoint(path: str | Path, *, verify: bool = False) -> Path:
    """Return the directory of the checkpoint that ``path`` refers to, usually named ``epoch_E_step_S``.

    ``path`` is one of

    - a step directory, or the directory of one rank in it,
    - the file ``latest`` or ``best`` of an output directory,
    - an output directory, for the checkpoint that its file ``latest`` names, or, without this file, for
      the newest checkpoint,
    - a checkpoint of PaddleFleetX,
    - an output directory of PaddleFleetX, for the checkpoint of the last step.

    Tensor data is checked only with ``verify``, and never in checkpoints of PaddleFleetX. Raises
    CheckpointError if the checkpoint is missing or damaged. No other checkpoint is returned in its place.
    """
    path = Path(path)
    if path.name in (LATEST_FILE, BEST_FILE) and path.is_file():
        return _follow(path, verify)
    if not path.is_dir():
        what = foreign_formats().described(path)
        raise CheckpointError(what or f"there is no directory {path}{_newest_hint(path.parent)}")
    step = path.resolve().parent if is_rank_directory(path.name) else path
    if _has_manifest(step):
        return _sound(step, step.parent, verify)
    if (path / LATEST_FILE).exists():
        return _follow(path / LATEST_FILE, verify)
    newest = newest_complete(path)
    return _sound(newest, path, verify) if newest else _resolve_other(path, step, verify)


def _resolve_other(path: Path, step: Path, verify: bool) -> Path:
    is_readable = foreign_formats().is_readable
    if is_readable(path):
        return path
    if steps := [child for child in step_directories(path) if is_readable(child)]:
        return max(steps, key=lambda child: parse_step_directory(child.name))
    if parse_step_directory(step.name):
        return _sound(step, step.parent, verify)  # always raises, because the checkpoint is incomplete
    what = foreign_formats().described(path)
    raise CheckpointError(what or f"there is no complete checkpoint in {path}")


@os_errors(CheckpointError)
def open_resolved(path: str | Path) -> Checkpoint:
    """Open the checkpoint at a path that `resolve_checkpoint` returned. Raises CheckpointError if the
    checkpoint is damaged."""
    path = Path(path)
    if not _has_manifest(path) and foreign_formats().is_readable(path):
        return foreign_formats().open(path)
    return open_checkpoint(path)


def open_named(path: str | Path) -> Checkpoint:
    """Open the checkpoint that ``path`` refers to (`resolve_checkpoint`)."""
    return open_resolved(resolve_checkpoint(path))


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_FILE).exists() or (path / MARKER_FILE).exists()


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint in ``output_dir``, or None. Does not notice damaged data."""
    complete = complete_checkpoints(output_dir)
    return complete[-1] if complete else None


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in ``output_dir`` that have an undamaged file ``COMPLETE``, oldest first."""
    found = []
    for path in step_directories(Path(output_dir)):
        try:
            saved_at = int(read_marker(path)["saved_at_ns"])
        except CheckpointError:
            continue
        found.append((saved_at, parse_step_directory(path.name)[::-1], path))
    return [path for _, _, path in sorted(found)]


def newest_good(
    output_dir: str | Path,
    *,
    verify: bool = True,
    is_eligible: Callable[[Checkpoint], bool] = lambda _: True,
    warns: bool = True,
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in ``output_dir``, or None. Damaged and incomplete ones are
    skipped.

    Args:
        verify: whether to read all data to find damage.
        is_eligible: a function that returns False for checkpoints to skip. By default, it always returns
            True.
        warns: whether to log a warning for each damaged or incomplete checkpoint.
    """
    complete = complete_checkpoints(output_dir)
    incomplete = [path for path in step_directories(Path(output_dir)) if path not in complete]
    for path in (*incomplete, *reversed(complete)):
        try:
            checkpoint = open_checkpoint(path)
            if not is_eligible(checkpoint):
                continue
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            if warns:
                get_logger().warning(f"skipped a damaged checkpoint: {error}")
            continue
        return checkpoint
    return None


def _follow(pointer: Path, verify: bool) -> Path:
    path = pointer.parent
    fields = read_sealed(pointer)
    if fields is None or parse_step_directory(fields.get("checkpoint", "")) is None:
        raise CheckpointError(f"{pointer} is damaged: its checksum is wrong{_hint_or_none_left(path)}")
    target = path / fields["checkpoint"]
    if not target.is_dir():
        raise CheckpointError(
            f"{pointer} names {target.name}, which does not exist{_hint_or_none_left(path)}"
        )
    resolved = _sound(target, path, verify)
    if read_marker(resolved)["manifest_sha256"] != fields["manifest_sha256"]:
        # The run was killed after it replaced this checkpoint and before it updated the pointer file.
        get_logger().warning(
            f"{target} is not the checkpoint that {pointer} was written for, but it is complete"
        )
    return resolved


def _sound(path: Path, output_dir: Path, verify: bool) -> Path:
    try:
        checkpoint = open_checkpoint(path)
        if verify:
            checkpoint.verify()
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_hint_or_none_left(output_dir, path)}") from error
    return path


def _hint_or_none_left(output_dir: Path, failed: Path | None = None) -> str:
    return _newest_hint(output_dir, failed) or f"; there is no other good checkpoint in {output_dir}"


def _newest_hint(output_dir: Path, failed: Path | None = None) -> str:
    """Return a phrase for the end of an error message, with the path of the newest undamaged checkpoint in
    ``output_dir``. Empty if there is none.

    Args:
        failed: the checkpoint that the error is about, which must not be recommended. If the search finds it
            undamaged after all, the result is empty.
    """
    good = newest_good(output_dir, warns=False)
    if good is None or (failed is not None and good.path.resolve() == failed.resolve()):
        return ""
    return (
        f"; the newest good checkpoint is {good.path}: continue there with Engine.save_load.ckpt_dir, or "
        "with resume=auto in its output directory"
    )


def step_directories(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if path.is_dir() and parse_step_directory(path.name)]
