"""``kill -9`` at random moments of a run that saves every step, again and again until it is done.

``python -m tests.faults.kill_campaign --kills 200`` kills as often while saving in the foreground, and as
often again while saving in the background. After every kill whatever has the name of a checkpoint must be
one, undamaged, of the same run, and not older than the newest before; what another run has put beside them
must be as it was; and every run that got to its end must have the losses, gradient norms and final tensors of
a run that nothing disturbed, bit for bit. Dropout is on, and only the newest few checkpoints are kept.

A run is a process forked from one that has imported Paddle, so that starting again takes little time.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.directory import newest_good, resolve_checkpoint
from ppfleetx.checkpoint.layout import merge
from ppfleetx.checkpoint.ownership import RunRecord, read_run, run_of
from ppfleetx.checkpoint.reader import Checkpoint, open_checkpoint
from ppfleetx.config.plan import ParallelPlan
from tests.e2e.program import losses, values_of
from tests.e2e.resumption import ONE, write_corpus
from tests.faults.harness import command_line
from tests.faults.program import EVERY_STEP
from tests.helpers.ranks import Nursery, RankPool
from tests.helpers.waiting import wait_for

KEPT = 3
STRANGER, NOBODYS = "epoch_7_step_7000", "epoch_8_step_8000"


@dataclass
class Campaign:
    """Kills runs of one plan that save in one way.

    Args:
        nursery: where processes come from.
        directory: empty; for the runs' outputs.
        corpus: prefix of a corpus.
        plan: degrees of the runs.
        overrides: more of the configuration, by dotted key.
        seed: of the moments at which to kill.
        steps: length of a run, a fifth of which lies between two kills at most.
    """

    nursery: Nursery
    directory: Path
    corpus: Path
    plan: ParallelPlan = ONE
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    steps: int = 40

    def __post_init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._random = random.Random(self.seed)
        self._reference = self.directory / "undisturbed"
        whole = self._seconds_to_the_end()
        begin = self._seconds_to_the_end()  # nothing is left to train
        self._longest = begin + max(0.0, whole - begin) / 5

    def _seconds_to_the_end(self) -> float:
        started = time.monotonic()
        assert self._run(self._reference, None), "the undisturbed run did not end"
        return time.monotonic() - started

    def kill(self, times: int) -> Counter[str]:
        """Kill ``times`` times, let the last run finish, and count what happened.

        Raises:
            AssertionError, CheckpointError: something was lost or came out different.
        """
        number = 0
        while self.found["kills"] < times:
            number += 1
            self._one_run(self.directory / f"run{number}", times)
        return self.found

    def _one_run(self, output_dir: Path, times: int) -> None:
        newest, self._runs = 0, set()
        while True:
            # From before Paddle is set up to some steps after that, so that every moment has its turn.
            moment = self._random.uniform(0, self._longest) if self.found["kills"] < times else None
            if self._run(output_dir, moment):
                break
            self.found["kills"] += 1
            newest = self._check_after_kill(output_dir, newest)
            self._let_others_in(output_dir)
        self._check_finished(output_dir)
        self.found["finished runs"] += 1

    def _run(self, output_dir: Path, moment: float | None) -> bool:
        """Start or continue the run and kill it after ``moment`` seconds. Return whether it finished."""
        saving = {
            **EVERY_STEP,
            "Engine.max_steps": self.steps,
            "Engine.save_load.keep_max": KEPT,
            "Engine.save_load.resume": "auto",
        }
        values = values_of(self.plan, self.corpus, output_dir, overrides={**saving, **self.overrides})
        pool = RankPool(self.nursery, self.plan.world_size)
        try:
            timer = threading.Timer(moment, pool.kill) if moment is not None else None
            if timer is not None:
                timer.start()
            outcomes = pool.call(
                "tests.e2e.program:train", timeout=300.0, values=values, world=self.plan.world_size
            )
            if timer is not None:
                timer.cancel()
                timer.join()
        finally:
            pool.close()
            _wait_until_gone(pool.pids)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert not errors or moment is not None, errors
        # Ranks that notice the end of another before their own turn say so; anything else is a defect.
        assert all(error.startswith("PeerEndedError") for error in errors), errors
        return not errors and not any(outcome.died for outcome in outcomes)

    def _check_after_kill(self, output_dir: Path, newest_before: int) -> int:
        """Check that what is named like a checkpoint is one. Return the newest step, which never falls."""
        self.found["kills amid a save"] += bool(list(output_dir.glob(".saving-*")))
        self.found["kills amid a deletion"] += bool(list(output_dir.glob(".deleting-*")))
        record = self._check_whose_it_is(output_dir)
        named = [path for path in sorted(output_dir.glob("epoch_*")) if path.name not in (STRANGER, NOBODYS)]
        for path in named:
            open_checkpoint(path).verify()
            assert run_of(path) == record.run
        if not named:
            assert newest_before == 0, f"the checkpoints of {output_dir} are gone"
            self.found["kills before the first checkpoint"] += 1
            return 0
        newest = newest_good(output_dir, counts=record.includes).step
        assert newest == max(open_checkpoint(path).step for path in named)
        assert newest >= newest_before, f"step {newest} after step {newest_before}"
        # `latest` is written after the name is given; a kill between the two leaves it behind.
        latest = newest if not (output_dir / "latest").exists() else self._latest_step(output_dir)
        assert latest <= newest
        self.found["kills between name and latest"] += latest < newest
        return newest

    def _latest_step(self, output_dir: Path) -> int:
        return open_checkpoint(resolve_checkpoint(output_dir / "latest", verify=True)).step

    def _check_whose_it_is(self, output_dir: Path) -> RunRecord | None:
        """Check that the directory still belongs to one run, and that other runs' files are unchanged."""
        record = read_run(output_dir)
        if record is None:
            assert not list(output_dir.glob("epoch_*")), f"{output_dir} has checkpoints and no run"
            return None
        self._runs.add(record.run)
        assert len(self._runs) == 1, f"{output_dir} changed hands"
        self._check_others(output_dir)
        return record

    def _let_others_in(self, output_dir: Path) -> None:
        """Add a checkpoint of another run and one of no run, once the directory belongs to this run."""
        if read_run(output_dir) is None or (output_dir / NOBODYS).exists():
            return
        last = resolve_checkpoint(self._reference)
        shutil.copytree(last, output_dir / STRANGER)
        shutil.move(merge(last, self.directory / f"copy of {output_dir.name}"), output_dir / NOBODYS)
        self.found["runs beside checkpoints of others"] += 1

    def _check_others(self, output_dir: Path) -> None:
        if not (output_dir / NOBODYS).exists():
            return
        expected = open_checkpoint(resolve_checkpoint(self._reference))
        for name, run in ((STRANGER, expected.manifest.run), (NOBODYS, None)):
            other = open_checkpoint(output_dir / name)
            other.verify()
            assert (other.manifest.run, other.step) == (run, self.steps)

    def _check_finished(self, output_dir: Path) -> None:
        self._check_whose_it_is(output_dir)
        kept = [path.name for path in output_dir.glob("epoch_*") if path.name not in (STRANGER, NOBODYS)]
        newest = {f"epoch_0_step_{self.steps - back}" for back in range(KEPT)}
        # Killed between its last save and the deletion after it, the run had nothing to do when it went on.
        assert newest <= {*kept} <= newest | {f"epoch_0_step_{self.steps - KEPT}"}, kept
        assert not list(output_dir.glob(".*.tmp")), "something unfinished is left"
        assert losses(output_dir) == losses(self._reference), f"losses of {output_dir} are different"
        ended, expected = (
            open_checkpoint(resolve_checkpoint(place, verify=True)) for place in (output_dir, self._reference)
        )
        assert (ended.step, ended.state) == (self.steps, expected.state)
        assert _checksums(ended) == _checksums(expected), f"tensors of {output_dir} are different"


def _checksums(checkpoint: Checkpoint) -> dict[tuple[str, str, str], list[tuple[str, ...]]]:
    tensors = checkpoint.manifest.tensors
    return {key: [piece.crc32 for piece in entry.slices] for key, entry in tensors.items()}


def _wait_until_gone(pids: list[int]) -> None:
    """Wait until killed processes have released their locks, a moment after their connections close."""
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="a killed process goes on")


def main() -> int:
    args = command_line(__doc__, kills=200, dp=1, mp=1).parse_args()
    nursery = Nursery()
    try:
        for in_background in (False, True):
            with tempfile.TemporaryDirectory(prefix="kills-") as name:
                started = time.monotonic()
                corpus = Path(name) / "toy"
                write_corpus(corpus)
                options = {"Engine.save_load.async_save": in_background}
                plan = ParallelPlan(dp=args.dp, mp=args.mp)
                campaign = Campaign(nursery, Path(name), corpus, plan, options, args.seed)
                found = campaign.kill(args.kills)
                counts = ", ".join(f"{what} {count}" for what, count in found.items())
                seconds = time.monotonic() - started
                print(
                    f"saving in the {'back' if in_background else 'fore'}ground: {counts} ({seconds:.0f} s)"
                )
                sys.stdout.flush()
    finally:
        nursery.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
