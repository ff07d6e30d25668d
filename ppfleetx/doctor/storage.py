"""The output directory: whether it can be written, how fast, and whether the checkpoints fit."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.config.counts import counted
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.run_directory import output_dir_of
from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn
from ppfleetx.planner.long_run import checkpoint_bytes
from ppfleetx.planner.prediction import run_prediction

_PIECE_BYTES, _PIECES = 4 << 20, 8
_SLOW_SECONDS = 120.0  # of one checkpoint
_CURES = {
    errno.EACCES: "let this user write there, or",
    errno.EPERM: "let this user write there, or",
    errno.EROFS: "mount it for writing (mount -o remount,rw; dmesg says why it may be read-only), or",
}


def output_directory(case: Case) -> Iterator[Row]:
    """Write a temporary file to the output directory, or where it will be created."""
    directory = output_dir_of(case.cfg)
    place = nearest_directory(directory)
    title = "output directory"
    if not place.is_dir():
        yield fail(title, f"{place} is a file", "give another one: -o Engine.save_load.output_dir=DIR")
        return
    where = str(directory) if place == directory else f"{directory} (to be created in {place})"
    try:
        speed = write_speed(place)
    except OSError as error:
        yield _refused(where, error)
        return
    needed = one_checkpoint(case.cfg)
    seconds = "" if needed is None else f"; a checkpoint of {words(needed)} takes {needed / speed:.1f} s"
    text = f"{where} is written at {words(speed)}/s by one process{seconds}"
    if needed is not None and needed / speed > _SLOW_SECONDS:
        cure = "a faster file system, or Engine.save_load.async_save if it is off, and fewer checkpoints"
        yield warn(title, text, cure, bytes_per_second=speed)
    else:
        yield ok(title, text, bytes_per_second=speed)


def room(case: Case) -> Iterator[Row]:
    """Free bytes against the checkpoints that the run will keep."""
    needed = one_checkpoint(case.cfg)
    if needed is None:
        yield skipped("room", "the size of a checkpoint is only known for training our own GPT")
        return
    place = nearest_directory(output_dir_of(case.cfg))
    yield room_row(shutil.disk_usage(place).free, needed, checkpoints_at_once(case.cfg), place)


def room_row(free: float, each: float, count: int, place: Path) -> Row:
    """Whether ``count`` checkpoints of ``each`` bytes fit into the ``free`` bytes of ``place``."""
    numbers = {"free_bytes": free, "needed_bytes": each * count}
    text = f"{words(free)} free in {place}; {counted(count, 'checkpoint')} of {words(each)}"
    if free < each:
        cure = "free some, or give another -o Engine.save_load.output_dir=DIR"
        return fail("room", f"{text}: not one fits", cure, **numbers)
    if free < each * count:
        text += f": {int(free // each)} fit"
        return warn("room", text, "-o Engine.save_load.keep_max=N deletes the oldest", **numbers)
    return ok("room", text, **numbers)


def nearest_directory(directory: Path) -> Path:
    """The directory itself, or its nearest parent that exists."""
    place = directory.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return directory if place == directory.absolute() else place


def write_speed(directory: Path) -> float:
    """Bytes a second at which one process writes to a file in ``directory`` and flushes it.

    Raises:
        OSError: it cannot.
    """
    piece = os.urandom(_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        begin = time.perf_counter()
        for _ in range(_PIECES):
            view = memoryview(piece)
            while view:
                view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())
        return _PIECES * _PIECE_BYTES / (time.perf_counter() - begin)


def _refused(where: str, error: OSError) -> Row:
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return fail("output directory", f"{where}: {why}", "free some, or give another directory")
    cure = _CURES.get(error.errno, "look at its file system (mount, dmesg), or")
    cure += " give another -o Engine.save_load.output_dir=DIR"
    return fail("output directory", f"{where} cannot be written: {why}", cure)


def one_checkpoint(cfg: RunConfig) -> float | None:
    """Bytes of a checkpoint of this run; None if the planner does not know."""
    prediction = run_prediction(cfg, cfg.Global.device)
    return None if prediction is None else checkpoint_bytes(prediction.case)


def checkpoints_at_once(cfg: RunConfig) -> int:
    """The largest number of checkpoints at a time: with ``keep_max`` the new one is written before the oldest
    is deleted."""
    options = cfg.Engine.save_load
    every = options.save_steps or cfg.Engine.max_steps
    written = -(-cfg.Engine.max_steps // every)
    return written if options.keep_max is None else min(written, options.keep_max + 1)


def words(num_bytes: float) -> str:
    """``1.5 GiB``."""
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"))
    unit, name = next(((unit, name) for unit, name in units if num_bytes >= unit), (1 << 10, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"
