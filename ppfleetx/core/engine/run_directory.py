"""The output directory of a run: whose it is, what of it may be deleted, and what is written when it begins.

Imports no Paddle: what can be refused is refused before it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.directory import (
    complete_checkpoints,
    open_resolved,
    resolve_checkpoint,
    step_directories,
)
from ppfleetx.checkpoint.housekeeping import (
    delete_checkpoint,
    describe_os_error,
    is_damaged,
    mend_latest,
    output_lock,
)
from ppfleetx.checkpoint.manifest import BEST_FILE, LATEST_FILE, parse_step_directory, read_sealed
from ppfleetx.checkpoint.ownership import RUN_FILE, Ownership, RunRecord, new_run, read_run, run_of, write_run
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.record import RECORD_MARK, run_record
from ppfleetx.config.sections import RunConfig
from ppfleetx.core.sources import sources
from ppfleetx.utils.files import atomic_write, exclusive_lock, put_aside, remove_unfinished
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.core.engine.start import Start

_KEY = "Engine.save_load.output_dir"
RESUME, CKPT_DIR, INIT_FROM = (f"Engine.save_load.{name}" for name in ("resume", "ckpt_dir", "init_from"))
CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"


# ---- before anything is written


def check_beginning(cfg: RunConfig) -> None:
    """Refuse a run that says two ways to begin, or would start anew where another run has been. Reads only.

    Raises:
        ConfigError: naming the keys, and what to do instead.
    """
    options, output_dir = cfg.Engine.save_load, output_dir_of(cfg)
    if options.init_from is not None and options.ckpt_dir is not None:
        raise ConfigError(
            "a run starts from weights (init_from) or resumes a checkpoint (ckpt_dir), not both",
            key=CKPT_DIR,
            value=options.ckpt_dir,
            place=cfg.origins.get(CKPT_DIR),
        )
    if options.resume or options.overwrite or not output_dir.is_dir():
        return
    try:
        found = _traces(output_dir)
    except OSError as error:
        raise _error(cfg, f"cannot be read: {describe_os_error(error)}") from error
    if not found or _resumes_within(cfg):
        return
    if found == [CONFIG_FILE] and not _is_record(output_dir / CONFIG_FILE):
        raise _error(
            cfg,
            f"holds a file {CONFIG_FILE} that no run wrote; a run writes its own configuration under that "
            "name. Give yours another name, or the run another directory",
        )
    raise _error(
        cfg,
        f"already holds a run ({', '.join(found)}). To go on with it: -o Engine.save_load.resume=auto. To "
        f"start anew: another directory with -o {_KEY}=DIR, or -o Engine.save_load.overwrite=True, which "
        "deletes what that run wrote (but for what this one is started from)",
    )


def output_dir_of(cfg: RunConfig) -> Path:
    """``Engine.save_load.output_dir``."""
    return Path(cfg.Engine.save_load.output_dir)


def _error(cfg: RunConfig, rule: str) -> ConfigError:
    return ConfigError(rule, key=_KEY, value=cfg.Engine.save_load.output_dir, place=cfg.origins.get(_KEY))


def _traces(output_dir: Path) -> list[str]:
    """What of a run is in a directory, in words."""
    found = sorted(step_directories(output_dir), key=lambda path: parse_step_directory(path.name)[::-1])
    files = [name for name in (RUN_FILE, METRICS_FILE, CONFIG_FILE) if (output_dir / name).is_file()]
    if not found:
        return files
    if len(found) == 1:
        return [f"checkpoint {found[0].name}", *files]
    return [f"{len(found)} checkpoints, {found[0].name} to {found[-1].name}", *files]


def _is_record(path: Path) -> bool:
    """Whether a run has written this configuration."""
    try:
        with path.open("rb") as file:
            return file.read(len(RECORD_MARK)) == RECORD_MARK.encode()
    except FileNotFoundError:
        return False


def _resumes_within(cfg: RunConfig) -> bool:
    """Whether ``ckpt_dir`` names a checkpoint of the run that is in the output directory."""
    place = cfg.Engine.save_load.ckpt_dir
    path = None if place is None else resolve_checkpoint(place)
    if path is None or not _lies_in(path, output_dir_of(cfg)):
        return False
    record = read_run(output_dir_of(cfg))
    return record is None or record.includes(open_resolved(path))


def _lies_in(checkpoint: Path, output_dir: Path) -> bool:
    return checkpoint.resolve().parent == output_dir.resolve()


def hold(cfg: RunConfig, stack: ExitStack) -> None:
    """Make the output directory and keep other runs out of it until ``stack`` ends; one rank does it for all.

    Raises:
        ConfigError: another run is at work in it or has been, or it cannot be made.
    """
    check_beginning(cfg)
    output_dir = output_dir_of(cfg)
    busy = _error(cfg, "another run is training in this directory")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        stack.enter_context(exclusive_lock(output_dir / ".run.lock", busy))
    except OSError as error:
        raise _error(cfg, f"cannot be written: {describe_os_error(error)}") from error
    check_beginning(cfg)  # a run may have ended here since


# ---- what a run is started from


def base_of(cfg: RunConfig) -> Path | None:
    """The step directory that ``Model.lora.base`` means now; None without one.

    Where it is the output directory itself, it means none of the checkpoints that this run has saved there.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    place = None if cfg.Model.lora is None else cfg.Model.lora.base
    if place is None:
        return None
    output_dir = output_dir_of(cfg)
    record = read_run(output_dir) if cfg.Engine.save_load.resume else None
    if record is not None and Path(place).resolve() == output_dir.resolve():
        others = [path for path in complete_checkpoints(output_dir) if run_of(path) != record.run]
        if others:
            return others[-1]
    return resolve_checkpoint(place)


def with_value(cfg: RunConfig, key: str, value: str) -> RunConfig:
    """A copy of ``cfg`` that names the very checkpoint which a place means now."""
    *sections, name = key.split(".")
    parents = [cfg]
    for section in sections:
        parents.append(getattr(parents[-1], section))
    changed = parents.pop().model_copy(update={name: value})
    for section, parent in zip(reversed(sections), reversed(parents), strict=True):
        changed = parent.model_copy(update={section: changed})
    return changed


def _spared(cfg: RunConfig) -> frozenset[Path]:
    """Step directories that the configuration names, with all links followed."""
    return frozenset(path for _, place in sources(cfg) for path in _meant_by(place))


def _meant_by(place: str) -> Iterator[Path]:
    try:
        yield resolve_checkpoint(place).resolve()
    except CheckpointError:  # not needed any more, or who needs it says so
        return


# ---- the beginning


def claim(cfg: RunConfig, start: Start, comes_to: Callable[[int, int], bool]) -> Ownership:
    """Make the output directory this run's, once nothing else can stop it; one rank does it for all.

    With ``Engine.save_load.overwrite`` the earlier run's files are deleted. The configuration is written, and
    what a killed run left unfinished is removed.

    Args:
        cfg: names the very checkpoints the run was started from.
        start: what it begins with.
        comes_to: whether the run may save a checkpoint of this epoch and step.

    Raises:
        ConfigError: a checkpoint that is not this run's has a name that the run may come to, or the directory
            cannot be written.
    """
    output_dir, options = output_dir_of(cfg), cfg.Engine.save_load
    earlier = read_run(output_dir)
    record = _record_of(cfg, start, earlier)
    ownership = Ownership(record.run, options.keep_max, _spared(cfg))
    try:
        leaving = _leaving(output_dir, earlier, ownership) if options.overwrite else []
        _refuse_names_in_use(cfg, ownership, leaving, comes_to)
        if options.overwrite:
            _overwrite(output_dir, earlier, leaving)
        for place in (output_dir, output_dir / "tokenizer", output_dir / "predictions"):
            remove_unfinished(place, (RUN_FILE, *(path.name for path in place.glob("*") if path.is_file())))
        if record != earlier:
            write_run(output_dir, record)
        if earlier is not None and earlier.run == record.run and start.state.step == 0:
            (output_dir / METRICS_FILE).unlink(missing_ok=True)  # this run's, before its first checkpoint
        _write_configuration(output_dir, cfg)
        if start.found_by == RESUME and options.resume == "auto":
            mend_latest(start.checkpoint)
    except OSError as error:
        raise _error(cfg, f"cannot be written: {describe_os_error(error)}") from error
    verb = "goes on" if earlier is not None and earlier.run == record.run else "begins"
    get_logger().info(f"run {record.run} {verb} in {output_dir}")
    return ownership


def _record_of(cfg: RunConfig, start: Start, earlier: RunRecord | None) -> RunRecord:
    """The run's identity: that of the run in the directory if it goes on with it, else a new one."""
    found = start.checkpoint
    if start.found_by in (RESUME, CKPT_DIR) and _lies_in(found.path, output_dir_of(cfg)):
        if cfg.Engine.save_load.overwrite:
            return RunRecord(new_run(), found.path.name)
        run = earlier.run if earlier is not None else found.manifest.run or new_run()
        return earlier or RunRecord(run, None if found.manifest.run == run else found.path.name)
    if earlier is not None and cfg.Engine.save_load.resume:  # killed before its first checkpoint
        return earlier
    return RunRecord(new_run())


def _leaving(output_dir: Path, earlier: RunRecord | None, ownership: Ownership) -> list[Path]:
    """Checkpoints of the earlier run that are to be deleted, oldest first."""
    if earlier is None:
        return []
    of_earlier = Ownership(earlier.run, spared=ownership.spared)
    return [path for path in complete_checkpoints(output_dir) if of_earlier.covers(path)]


def _refuse_names_in_use(
    cfg: RunConfig, ownership: Ownership, leaving: list[Path], comes_to: Callable[[int, int], bool]
) -> None:
    in_the_way = [
        path.name
        for path in sorted(output_dir_of(cfg).iterdir())
        if (at := parse_step_directory(path.name)) is not None
        and comes_to(*at)
        and path not in leaving
        and not ownership.covers(path)
        and not (is_damaged(path) and path.resolve() not in ownership.spared)
    ]
    if in_the_way:
        raise _error(
            cfg,
            f"holds {', '.join(in_the_way)}, which this run did not make or is started from, and would save "
            "under the same name. Move what is there away, or give the run another directory",
        )


def _overwrite(output_dir: Path, earlier: RunRecord | None, leaving: list[Path]) -> None:
    """Delete what the earlier run wrote; without a record of it, nothing is known to be its."""
    names = {path.name for path in leaving}
    with output_lock(output_dir):
        for pointer in (output_dir / LATEST_FILE, output_dir / BEST_FILE):
            fields = read_sealed(pointer) if pointer.is_file() else None
            if fields is not None and fields.get("checkpoint") in names:
                pointer.unlink()
        for path in leaving:
            delete_checkpoint(path)
    if earlier is None:
        return
    (output_dir / METRICS_FILE).unlink(missing_ok=True)
    for path in output_dir.glob("vdl/vdlrecords.*.log"):
        path.unlink()
    get_logger().warning(
        f"overwriting run {earlier.run} in {output_dir}: deleted its metrics and {len(leaving)} checkpoints"
    )


def _write_configuration(output_dir: Path, cfg: RunConfig) -> None:
    """Write ``config.yaml``; one that no run wrote keeps its content under another name."""
    path, text = output_dir / CONFIG_FILE, run_record(cfg)
    if path.exists() and not _is_record(path):
        get_logger().info(f"a configuration that no run wrote is now {put_aside(path)}")
    with atomic_write(path, "w") as file:
        file.write(text)
