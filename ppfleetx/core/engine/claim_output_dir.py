"""Claim the output directory for a run: check and lock it, delete files of an earlier run, and write the
configuration and the run's identity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ppfleetx.checkpoint.manifest import BEST_FILE, LATEST_FILE, parse_step_directory, read_sealed
from ppfleetx.checkpoint.model_only import find_tokenizer_dir
from ppfleetx.checkpoint.output_dir import (
    delete_checkpoint,
    describe_os_error,
    is_damaged,
    keep_newest,
    output_lock,
    repair_latest,
)
from ppfleetx.checkpoint.resolve_checkpoint import (
    complete_checkpoints,
    resolve_checkpoint,
    step_directories,
)
from ppfleetx.checkpoint.run_ownership import RUN_FILE, Ownership, RunRecord, new_run, read_run, write_run
from ppfleetx.config.errors import CheckpointError, DataError
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.yaml_dump import is_record, run_record
from ppfleetx.core.engine.check_output_dir import (
    CKPT_DIR,
    CONFIG_FILE,
    METRICS_FILE,
    RESUME,
    check_start,
    directory_error,
    lies_in,
    output_dir_of,
)
from ppfleetx.core.engine.restore import Start
from ppfleetx.core.engine.train_state import TrainingLength
from ppfleetx.core.loggers.files import CSV_FILE
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.coordination import gather, joint_errors
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, exclusive_lock, put_aside, remove_unfinished


def lock_output_dir(cfg: RunConfig, stack: contextlib.ExitStack) -> None:
    """Create the output directory, and lock it until ``stack`` is closed. Only rank 0 may call it. Raises
    ConfigError if the directory cannot be used."""
    check_start(cfg)
    output_dir = output_dir_of(cfg)
    busy = directory_error(
        cfg,
        "another run is training in this directory; wait until it has ended, or give this run another "
        "directory with -o Engine.save_load.output_dir=DIR",
    )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        stack.enter_context(exclusive_lock(output_dir / ".run.lock", busy))
    except OSError as error:
        raise directory_error(cfg, f"cannot be written: {describe_os_error(error)}") from error
    check_start(cfg)  # another run may have ended here in the meantime


def begin(
    cfg: RunConfig, ctx: ParallelContext, start: Start, length: TrainingLength, tokenizer: Tokenizer | None
) -> Ownership:
    """Claim the output directory for this run, and write the configuration and the tokenizer into it. With
    ``Engine.save_load.overwrite``, delete files of the earlier run. Returns the :class:`Ownership`, which
    decides which checkpoints in the directory the run may delete or replace. All ranks must call this.
    Raises ConfigError, on all ranks, if files of another run are in the way."""
    # The last check before training, because it may delete files.
    ownership = None
    with joint_errors(ctx, name_ranks=False):
        if ctx.is_main:
            _refuse_other_tokenizer(cfg, tokenizer)
            ownership = claim(cfg, start, partial(length.will_reach, start.state, cfg.batch))
            if tokenizer is not None:
                _save_tokenizer(cfg, tokenizer)
    run = gather(ctx, None if ownership is None else ownership.run)[0]
    return ownership or Ownership(run, cfg.Engine.save_load.keep_max)


def _save_tokenizer(cfg: RunConfig, tokenizer: Tokenizer) -> None:
    try:
        tokenizer.save(output_dir_of(cfg) / "tokenizer")
    except OSError as error:
        raise directory_error(cfg, f"cannot be written: {describe_os_error(error)}") from error


def _refuse_other_tokenizer(cfg: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if the output directory holds a tokenizer that no run wrote and that differs from
    ``tokenizer``."""
    place = output_dir_of(cfg) / "tokenizer"
    if tokenizer is None or not place.exists() or read_run(output_dir_of(cfg)) is not None:
        return
    try:
        is_equal = Tokenizer.load(place, eod_token=tokenizer.eod_token).fingerprint == tokenizer.fingerprint
    except DataError:
        is_equal = False
    if not is_equal:
        raise directory_error(
            cfg,
            f"{place} exists and is not the tokenizer of Data.tokenizer, which a run writes there; "
            "remove it or give the run another directory",
        )


def claim(cfg: RunConfig, start: Start, will_reach: Callable[[int, int], bool]) -> Ownership:
    """Claim the output directory on rank 0. Returns the :class:`Ownership`, which decides which checkpoints
    in the directory this run may delete or replace.

    Writes the configuration and the run's identity, and removes unfinished files of a killed run. With
    ``Engine.save_load.overwrite``, deletes the checkpoints and metrics of the earlier run. If this run
    continues the earlier run, deletes that run's checkpoints beyond ``keep_max``. If that run was killed
    before its first checkpoint, this run starts again at step 0, and the metrics files are deleted.

    Args:
        will_reach: a function of (epoch, step) that returns whether this run can save a checkpoint with
            this epoch and step in its name.

    Raises:
        ConfigError: the directory cannot be written, or another run's checkpoint has a name under which
            this run would save a checkpoint.
    """
    output_dir, options = output_dir_of(cfg), cfg.Engine.save_load
    earlier = read_run(output_dir)
    record = _record_of(cfg, start, earlier)
    spared = frozenset(path for _, place in cfg.weight_sources() for path in _checkpoint_at(place))
    ownership = Ownership(record.run, options.keep_max, spared)
    try:
        to_delete = _checkpoints_to_delete(output_dir, earlier, ownership) if options.overwrite else []
        _refuse_names_in_use(cfg, ownership, to_delete, will_reach)
        if options.overwrite:
            _delete_earlier_run(output_dir, earlier, to_delete)
        for place in (output_dir, output_dir / "tokenizer", output_dir / "predictions"):
            remove_unfinished(place, (RUN_FILE, *(path.name for path in place.glob("*") if path.is_file())))
        if record != earlier:
            write_run(output_dir, record)
        goes_on = earlier is not None and earlier.run == record.run
        if goes_on and start.state.step == 0 and not step_directories(output_dir):
            for name in (METRICS_FILE, CSV_FILE):  # written before the run's first checkpoint
                (output_dir / name).unlink(missing_ok=True)
        _write_configuration(output_dir, cfg)
        if start.found_by == RESUME and options.resume == "auto":
            repair_latest(start.checkpoint)
        if goes_on:
            keep_newest(output_dir, ownership)  # the run may have been killed between saving and deleting
    except OSError as error:
        raise directory_error(cfg, f"cannot be written: {describe_os_error(error)}") from error
    get_logger().info(f"run {record.run} {'continues' if goes_on else 'begins'} in {output_dir}")
    return ownership


def _checkpoint_at(place: str) -> Iterator[Path]:
    """Yield the directory of the checkpoint at the path ``place``, with symbolic links resolved. Yields
    nothing if there is no checkpoint."""
    with contextlib.suppress(CheckpointError):  # the code that loads it reports the error
        yield resolve_checkpoint(place).resolve()


def _record_of(cfg: RunConfig, start: Start, earlier: RunRecord | None) -> RunRecord:
    """Return the identity of this run. A run that continues an earlier one in the same directory, without
    overwriting it, has the same identity. Any other run gets a new identity."""
    found = start.checkpoint
    if start.found_by in (RESUME, CKPT_DIR) and lies_in(found.path, output_dir_of(cfg)):
        if cfg.Engine.save_load.overwrite:
            return RunRecord(new_run(), found.path.name)
        run = earlier.run if earlier is not None else found.manifest.run or new_run()
        return earlier or RunRecord(run, None if found.manifest.run == run else found.path.name)
    if earlier is not None and cfg.Engine.save_load.resume:  # killed before its first checkpoint
        return earlier
    return RunRecord(new_run())


def _checkpoints_to_delete(output_dir: Path, earlier: RunRecord | None, ownership: Ownership) -> list[Path]:
    if earlier is None:
        return []
    of_earlier = Ownership(earlier.run, spared=ownership.spared)
    return [path for path in complete_checkpoints(output_dir) if of_earlier.may_replace(path)]


def _refuse_names_in_use(
    cfg: RunConfig, ownership: Ownership, to_delete: list[Path], will_reach: Callable[[int, int], bool]
) -> None:
    in_the_way = [
        path.name
        for path in sorted(output_dir_of(cfg).iterdir())
        if (at := parse_step_directory(path.name)) is not None
        and will_reach(*at)
        and path not in to_delete
        and not ownership.may_replace(path)
        and not (is_damaged(path) and path.resolve() not in ownership.spared)
    ]
    if in_the_way:
        raise directory_error(
            cfg,
            f"holds {', '.join(in_the_way)}, and this run would save under the same name. A run replaces "
            "only its own checkpoints, and never the one it starts from. Move what is there, or give the run "
            "another directory",
        )


def _delete_earlier_run(output_dir: Path, earlier: RunRecord | None, to_delete: list[Path]) -> None:
    """Delete the checkpoints in ``to_delete`` and the metrics of the run ``earlier``. Also delete the files
    ``latest`` and ``best`` if they name one of these checkpoints. Without ``earlier``, metrics are kept."""
    names = {path.name for path in to_delete}
    with output_lock(output_dir):
        for pointer in (output_dir / LATEST_FILE, output_dir / BEST_FILE):
            fields = read_sealed(pointer) if pointer.is_file() else None
            if fields is not None and fields.get("checkpoint") in names:
                pointer.unlink()
        for path in to_delete:
            delete_checkpoint(path)
    if staying := sorted(path.name for path in step_directories(output_dir)):
        get_logger().warning(
            f"not deleted in {output_dir}: {', '.join(staying)}. A run keeps checkpoints that it starts "
            "from, that the earlier run did not save, or that have additional files"
        )
    if earlier is None:
        return
    curves = (METRICS_FILE, CSV_FILE, "vdl/vdlrecords.*.log", "tensorboard/events.out.tfevents.*")
    for path in (path for pattern in curves for path in output_dir.glob(pattern)):
        path.unlink()
    get_logger().warning(
        f"overwriting run {earlier.run} in {output_dir}: deleted its metrics and "
        f"{counted(len(to_delete), 'checkpoint')}"
    )


def _write_configuration(output_dir: Path, cfg: RunConfig) -> None:
    """Write the run's ``config.yaml``. An existing ``config.yaml`` that no run wrote is renamed first."""
    path, text = output_dir / CONFIG_FILE, run_record(_with_lasting_tokenizer(cfg, output_dir))
    if path.exists() and not is_record(path):
        get_logger().info(f"renamed a configuration that no run wrote to {put_aside(path)}")
    with atomic_write(path, "w") as file:
        file.write(text)


def _with_lasting_tokenizer(cfg: RunConfig, output_dir: Path) -> RunConfig:
    """Return ``cfg`` with the run's own copy of the tokenizer, if ``cfg`` names the one of the weights from
    which the run starts. They may be removed later, and a model of Hugging Face is converted into a temporary
    directory, which is removed at the end of the run."""
    tokenizer, start = cfg.Data.tokenizer, cfg.Engine.save_load.init_from
    if tokenizer is None or tokenizer.dir is None or start is None:
        return cfg
    of_weights = [find_tokenizer_dir(path) for path in _checkpoint_at(start)]
    if Path(tokenizer.dir).resolve() not in (place.resolve() for place in of_weights if place is not None):
        return cfg
    tokenizer = tokenizer.model_copy(update={"dir": str(output_dir / "tokenizer")})
    return cfg.model_copy(update={"Data": cfg.Data.model_copy(update={"tokenizer": tokenizer})})
