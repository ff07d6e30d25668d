"""Kills at random moments; ``PPFLEETX_TESTS_TIMES=30`` runs thirty times as many."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppfleetx.checkpoint.reader import Checkpoint, open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import newest_good, resolve_checkpoint
from ppfleetx.checkpoint.run_ownership import read_run, run_of
from tests.e2e.program import losses, values_of
from tests.e2e.resumption import ONE
from tests.faults.program import EVERY_STEP
from tests.helpers.ranks import RankPool, shared_nursery
from tests.helpers.waiting import wait_for

KEPT, STEPS = 3, 12
TIMES = int(os.environ.get("PPFLEETX_TESTS_TIMES", "1"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_killed_runs_end_as_if_nothing_had_happened(tmp_path, corpus, in_background):
    killed = KilledRuns(tmp_path, corpus, {"Engine.save_load.async_save": in_background})
    kills = number = 0
    while kills < 6 * TIMES:
        number += 1
        kills += killed.kill_until_done(tmp_path / f"run{number}", 6 * TIMES - kills)


class KilledRuns:
    """Runs that save every step and are killed at random moments until they are done.

    After each kill, everything named like a checkpoint must be a complete one of the same run, and not older
    than the newest one before. A finished run must have the losses, gradient norms and final tensors of an
    undisturbed run, bit for bit. Dropout is on, and only the newest checkpoints are kept. Each run is forked
    from a process that has imported Paddle.
    """

    def __init__(self, directory: Path, corpus: Path, overrides: dict[str, Any]) -> None:
        saving = {"Engine.save_load.keep_max": KEPT, "Engine.save_load.resume": "auto"}
        self._overrides = {**EVERY_STEP, "Engine.max_steps": STEPS, **saving, **overrides}
        self._corpus, self._random, self._reference = corpus, random.Random(7), directory / "undisturbed"
        whole = self._seconds_to_the_end()
        begin = self._seconds_to_the_end()  # nothing is left to train
        self._longest = begin + max(0.0, whole - begin) / 5

    def _seconds_to_the_end(self) -> float:
        started = time.monotonic()
        assert self._run(self._reference, None), "the undisturbed run did not end"
        return time.monotonic() - started

    def kill_until_done(self, output_dir: Path, most: int) -> int:
        """Kill a run up to ``most`` times and let it finish; returns how often it was killed."""
        newest, kills = 0, 0
        # From before Paddle is set up to some steps after that, so that every moment has its turn.
        while not self._run(output_dir, self._random.uniform(0, self._longest) if kills < most else None):
            kills += 1
            newest = self._check_after_kill(output_dir, newest)
        self._check_finished(output_dir)
        return kills

    def _run(self, output_dir: Path, moment: float | None) -> bool:
        """Start or continue the run and kill it after ``moment`` seconds. Return whether it finished."""
        values = values_of(ONE, self._corpus, output_dir, overrides=self._overrides)
        pool = RankPool(shared_nursery(), 1)
        timer = threading.Timer(300.0 if moment is None else moment, pool.kill)
        try:
            timer.start()
            (outcome,) = pool.call("tests.e2e.program:train", timeout=300.0, values=values, world=1)
            timer.cancel()
            timer.join()
        finally:
            pool.close()
            # A killed process releases its locks a moment after its connections close.
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pool.pids))
        assert outcome.error is None, outcome.error
        assert moment is not None or not outcome.died
        return not outcome.died

    def _check_after_kill(self, output_dir: Path, newest_before: int) -> int:
        """Check that what is named like a checkpoint is one. Return the newest step, which never falls."""
        named, record = sorted(output_dir.glob("epoch_*")), read_run(output_dir)
        if not named:
            assert newest_before == 0, f"the checkpoints of {output_dir} are gone"
            return 0
        for path in named:
            open_checkpoint(path).verify()
            assert run_of(path) == record.run
        newest = newest_good(output_dir, is_eligible=record.includes).step
        assert newest == max(open_checkpoint(path).step for path in named)
        assert newest >= newest_before, f"step {newest} after step {newest_before}"
        # `latest` is written after the name is given; a kill between the two leaves it behind.
        if (output_dir / "latest").exists():
            assert open_checkpoint(resolve_checkpoint(output_dir / "latest", verify=True)).step <= newest
        return newest

    def _check_finished(self, output_dir: Path) -> None:
        kept = {path.name for path in output_dir.glob("epoch_*")}
        newest = {f"epoch_0_step_{STEPS - back}" for back in range(KEPT)}
        # Killed between its last save and the deletion after it, the run had nothing to do when it went on.
        assert newest <= kept <= newest | {f"epoch_0_step_{STEPS - KEPT}"}, kept
        assert not list(output_dir.glob(".*.tmp")), "something unfinished is left"
        assert losses(output_dir) == losses(self._reference), f"losses of {output_dir} are different"
        ended, expected = (
            open_checkpoint(resolve_checkpoint(place, verify=True)) for place in (output_dir, self._reference)
        )
        assert (ended.step, ended.state) == (STEPS, expected.state)
        assert _checksums(ended) == _checksums(expected), f"tensors of {output_dir} are different"


def _checksums(checkpoint: Checkpoint) -> dict[tuple[str, str, str], list[tuple[str, ...]]]:
    tensors = checkpoint.manifest.tensors
    return {key: [piece.crc32 for piece in entry.slices] for key, entry in tensors.items()}
