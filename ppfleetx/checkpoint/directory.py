"""Find checkpoints: by configuration or path, all complete checkpoints, or the newest good checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def weight_sources(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and value of every checkpoint from which a configuration takes weights."""
    options, lora = cfg.Engine.save_load, cfg.Model.lora
    for key, place in (
        ("Engine.save_load.ckpt_dir", options.ckpt_dir),
        ("Engine.save_load.init_from", options.init_from),
        ("Model.lora.base", None if lora is None else lora.base),
    ):
        if place is not None:
            yield key, place


def named_checkpoint(cfg: RunConfig) -> str:
    """Return ``Engine.save_load.ckpt_dir``. Raises ConfigError if it is not set."""
    if cfg.Engine.save_load.ckpt_dir is None:
        raise ConfigError(
            "names no checkpoint; give -o Engine.save_load.ckpt_dir=DIR (a step directory or an output "
            "directory of a training run)",
            key="Engine.save_load.ckpt_dir",
        )
    return cfg.Engine.save_load.ckpt_dir


@os_errors(CheckpointError)
def resolve_checkpoint(path: str | Path, *, verify: bool = False) -> Path:
    """Return the step directory that ``path`` refers to.

    ``path`` is a step directory, a rank directory in a step directory, an output directory, or the file
    ``latest`` or ``best`` of an output directory. An output directory resolves to the checkpoint named in
    ``latest``, else to the newest complete checkpoint. A FleetX checkpoint is a directory with
    ``model.pdparams``, a directory of such rank directories, or an output directory (last step).

    Checks the marker, manifest, file sizes and headers, and with ``verify`` all data. Raises CheckpointError
    if there is no good checkpoint; the message names the newest good checkpoint, or says how to convert a
    foreign one.
    """
    path = Path(path)
    if path.name in (LATEST_FILE, BEST_FILE) and path.is_file():
        return _follow(path, verify)
    if not path.is_dir():
        what = foreign_formats().described(path)
        raise CheckpointError(what or f"there is no directory {path}{_newest(path.parent)}")
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
    """Open the result of `resolve_checkpoint`, a native checkpoint or a FleetX checkpoint. Raises
    CheckpointError."""
    path = Path(path)
    if not _has_manifest(path) and foreign_formats().is_readable(path):
        return foreign_formats().open(path)
    return open_checkpoint(path)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_FILE).exists() or (path / MARKER_FILE).exists()


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the complete checkpoint saved last in ``output_dir``, or None. Reads only the markers."""
    complete = complete_checkpoints(output_dir)
    return complete[-1] if complete else None


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints of ``output_dir`` with a valid marker, in the order in which they were saved."""
    found = []
    for path in step_directories(Path(output_dir)):
        try:
            saved_at = int(read_marker(path)["saved_at_ns"])
        except CheckpointError:
            continue
        found.append((saved_at, parse_step_directory(path.name)[::-1], path))
    return [path for _, _, path in sorted(found)]


def newest_good(
    output_dir: str | Path, *, verify: bool = True, counts: Callable[[Checkpoint], bool] = lambda _: True
) -> Checkpoint | None:
    """Return the undamaged checkpoint that was saved last, among those for which ``counts`` returns True.

    With ``verify``, all its data is read. Logs a warning for each newer damaged checkpoint, and for each
    checkpoint whose marker is missing or damaged.
    """
    found, damage = _search_good(Path(output_dir), verify, counts)
    for error in damage:
        get_logger().warning(f"skipped a damaged checkpoint: {error}")
    return found


def _search_good(
    output_dir: Path, verify: bool, counts: Callable[[Checkpoint], bool] = lambda _: True
) -> tuple[Checkpoint | None, list[CheckpointError]]:
    complete = complete_checkpoints(output_dir)
    damage = []
    for path in step_directories(output_dir):
        if path not in complete:
            try:
                read_marker(path)
            except CheckpointError as error:
                damage.append(error)
    for path in reversed(complete):
        try:
            checkpoint = open_checkpoint(path)
            if not counts(checkpoint):
                continue
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            damage.append(error)
            continue
        return checkpoint, damage
    return None, damage


def _follow(pointer: Path, verify: bool) -> Path:
    path = pointer.parent
    fields = read_sealed(pointer)
    if fields is None or parse_step_directory(fields.get("checkpoint", "")) is None:
        raise CheckpointError(f"{pointer} is damaged: its checksum is wrong{_instead(path)}")
    target = path / fields["checkpoint"]
    if not target.is_dir():
        raise CheckpointError(f"{pointer} names {target.name}, which does not exist{_instead(path)}")
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
        raise CheckpointError(f"{error}{_instead(output_dir, path)}") from error
    return path


def _instead(output_dir: Path, bad: Path | None = None) -> str:
    return _newest(output_dir, bad) or f"; there is no other good checkpoint in {output_dir}"


def _newest(output_dir: Path, bad: Path | None = None) -> str:
    """Return text for an error message that names the newest good checkpoint other than ``bad``, or "" if
    there is none."""
    good, _ = _search_good(output_dir, verify=True)
    if good is None or (bad is not None and good.path.resolve() == bad.resolve()):
        return ""
    return (
        f"; the newest good checkpoint is {good.path}: continue there with Engine.save_load.ckpt_dir, or "
        "with resume=auto in its output directory"
    )


def step_directories(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if path.is_dir() and parse_step_directory(path.name)]
