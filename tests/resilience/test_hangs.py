"""The one-sentence explanation that is made from the reports of a hung job's ranks, and the command that
shows it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppfleetx.checkpoint import storage
from ppfleetx.checkpoint.manager import BackgroundManager, HostCopier
from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError
from ppfleetx.data.dataloader import DataLoader, GlobalBatchSampler
from ppfleetx.resilience import hang_report
from ppfleetx.resilience.flight_recorder import RECORD, CallRecord
from ppfleetx.resilience.hang_diagnosis import explain, explain_alone
from ppfleetx.resilience.hang_report import CallNote, Identity, Report, ReportDir, capture_report
from ppfleetx.resilience.progress import READING, Progress
from ppfleetx.resilience.watchdog import Limits, Watchdog
from tests.checkpoint.checkpoints import slices

MP, PP = tuple(range(4)), (0, 4)
NAMES = {MP: ("the mp group [0..3]", 7), (*MP, 4): ("the tp group [0..4]", 7), PP: ("the pp group [0, 4]", 9)}


def note(operation: str = "all_reduce", number: int = 5, ranks=MP, shape=(2, 8), **more: Any) -> CallNote:
    group, group_id = NAMES[ranks]
    fields = {"peer": -1, "dtype": "float32", "seconds_ago": 600.0, "state": "in the call", **more}
    return CallNote(operation, number, group=group, group_id=group_id, ranks=ranks, shape=shape, **fields)


def report(rank: int, waits_for: CallNote | None = None, **more: Any) -> Report:
    fields: dict[str, Any] = {
        "world_size": 4,
        "host": "node0",
        "pid": 100 + rank,
        "written": 1000.0,
        "step": 7,
        "place": "in its step",
        "place_seconds": 600.0,
        "quiet_seconds": 600.0,
        "timeout": 600.0,
        "works": False,
        "where": "stages.py:12 in forward",
        "waits_for": waits_for,
        "counts": {"7": 6},
        "calls": [] if waits_for is None else [waits_for],
    }
    return Report(rank=rank, **{**fields, **more})


def told(*reports: Report) -> str:
    return explain({one.rank: one for one in reports}).sentence


WAITING = [report(rank, note()) for rank in range(3)]
CALL = "all_reduce #5 of the mp group [0..3] (shape [2, 8], float32)"


def silent(**more: Any) -> list[Report]:
    """Rank 3 has written no report; what the others know of it."""
    return [report(rank, note(), **more) for rank in range(3)]


def crossed() -> list[Report]:
    """Rank 0 and rank 4 wait for each other."""
    before, other, waits = note(number=4), note("all_gather", 1, PP), note(ranks=(*MP, 4))
    first = report(0, waits, counts={"7": 6, "9": 1}, world_size=5, calls=[before, note()])
    others = [report(rank, waits, world_size=5) for rank in (1, 2, 3)]
    return [first, *others, report(4, other, counts={"7": 5, "9": 2}, world_size=5, calls=[before, other])]


SAVING = {"place": "saving a checkpoint", "where": "writer.py:9 in write"}
READS = {"place": "reading data", "where": "npy.py:3 in load"}
NO_REPORT = "rank 3 never arrived and wrote no report: its process "
CASES = {
    "reads data": (
        [*WAITING, report(3, counts={"7": 5}, **READS)],
        [
            f"ranks 0-2 wait in {CALL}",
            "rank 3 never arrived: it is reading data (npy.py:3 in load)",
            "(step 7)",
        ],
    ),
    "unseen": (silent(peers={}), [NO_REPORT + "cannot be seen from here"]),
    "ended": (silent(peers={3: "has ended"}), [NO_REPORT + "has ended"]),
    "killed for memory": (
        silent(peers={3: "has ended"}, killed_for_memory=1),
        [NO_REPORT + "has ended", "the kernel has killed a process because memory ran out"],
    ),
    "stopped": (silent(peers={3: "is stopped (SIGSTOP or Ctrl-Z)"}), [NO_REPORT + "is stopped (SIGSTOP"]),
    "holds the interpreter": (silent(peers={3: ""}), [NO_REPORT + "runs, but not its Python threads"]),
    "other shape": (
        [*WAITING, report(3, note(shape=(2, 9)))],
        [
            f"rank 0 waits in {CALL}, and the calls differ",
            "ranks 0-2 call all_reduce with shape [2, 8]",
            "rank 3 calls all_reduce with shape [2, 9]",
        ],
    ),
    "other operation": ([*WAITING, report(3, note("broadcast"))], ["rank 3 calls broadcast with"]),
    "parts of an all-to-all may differ": (
        [report(rank, note("all_to_all", shape=(rank, 2))) for rank in range(4)],
        ["the messages do not get through"],
    ),
    "each waits for the other": (
        crossed(),
        [
            "rank 0 waits in all_reduce #5 of the tp group [0..4]",
            "rank 4 waits in all_gather #1 of the pp group [0, 4]",
            "so each waits for the other; the last that both called was all_reduce #4 of the mp group [0..3]",
        ],
    ),
    "message not sent": (
        [
            report(0, world_size=5, counts={"9>4": 3}, **SAVING),
            *(report(rank, note(), world_size=5) for rank in (1, 2, 3)),
            report(4, note("recv", 3, PP, peer=0), world_size=5, counts={"9<0": 4}),
        ],
        [
            "rank 4 waits in recv #3 from rank 0 in the pp group [0, 4]",
            "rank 0 never arrived: it is saving a checkpoint (writer.py:9 in write)",
        ],
    ),
    "nothing gets through": (
        [report(rank, note(), host=f"node{rank // 2}") for rank in range(4)],
        [f"ranks 0-3 wait in {CALL}", "the messages do not get through", "between node0 and node1"],
    ),
    "has answered, and is not done": (
        [*(replace(one, waits_for=note(asks=True)) for one in WAITING), report(3, **SAVING)],
        ["rank 3 never arrived: it is saving a checkpoint"],
    ),
    "failed": (
        [
            *(replace(one, failure="PeerLostError: rank 3 is gone", lost=True) for one in WAITING),
            report(3, failure="ValueError: bad sample", **READS),
        ],
        ["rank 3 failed, reading data (npy.py:3 in load): ValueError: bad sample"],
    ),
    "lost": (
        [replace(one, failure="PeerLostError: rank 3 is gone", lost=True) for one in WAITING],
        [f"ranks 0-2 wait in {CALL}; PeerLostError: rank 3 is gone"],
    ),
    "out of step": (
        [replace(one, failure="OutOfStepError: x") for one in (*WAITING, report(3, note("reduce")))],
        ["as number 5 ranks 0-2 call all_reduce with"],
    ),
    "another step": (
        [*WAITING, report(3, place="evaluating", counts={"7": 5}, step=8)],
        ["rank 3 is at step 8, the others at step 7"],
    ),
    "alone": (
        [report(0, world_size=1, **READS)],
        ["no rank waits for another: it is reading data (npy.py:3 in load)"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_says_who_is_missing_where(case: str) -> None:
    reports, words = CASES[case]
    sentence = told(*reports)
    assert [one for one in words if one not in sentence] == [], sentence


def test_where_no_report_can_be_written_a_rank_says_nothing_of_the_others():
    assert "what the other ranks do is not known" in explain_alone(WAITING[1]).sentence
    assert explain_alone(replace(WAITING[1], works=True)).goes_on == (1,)


def test_a_rank_that_works_keeps_the_job():
    working = report(3, works=True, quiet_seconds=0.1, counts={"7": 5})
    assert explain({one.rank: one for one in (*WAITING, working)}).goes_on == (3,)
    endless = replace(working, works=False, computes=True, quiet_seconds=600.0)
    found = explain({one.rank: one for one in (*WAITING, endless)})
    assert found.goes_on == ()
    assert "in its step (stages.py:12 in forward), and has computed there for 600 s" in found.sentence


def test_the_command_prints_sentence_and_ranks(tmp_path, capsys):
    (tmp_path / "hang").mkdir()
    for one in WAITING:
        (tmp_path / "hang" / f"rank_{one.rank:05d}.json").write_text(one.to_json())
    old = report(3, written=10.0)  # of an earlier hang of the run
    (tmp_path / "hang" / "rank_00003.json").write_text(old.to_json())
    call("hang-report", [str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ranks 0-2 wait in {CALL}; rank 3 never arrived and wrote no report: ")
    assert lines[2].startswith("rank 0 on node0, step 7: waits in all_reduce #5 of the mp group [0..3]")
    assert lines[5] == "rank 3: no report"
    assert re.fullmatch(r"written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", lines[6])
    call("hang-report", [str(tmp_path / "hang"), "--json"])
    told_again = json.loads(capsys.readouterr().out)
    assert told_again["sentence"] == lines[0]
    assert told_again["silent"] == told_again["missing"] == [3]
    assert told_again["ranks"]["1"]["waits_for"]["number"] == 5


def test_the_command_reads_the_newest_of_a_directory(tmp_path, capsys):
    """Of an evaluation beside a training, and of a job that had more ranks before."""
    for directory, one in (
        ("hang", report(7, world_size=8, written=990.0)),
        ("hang", report(0, place="saving a checkpoint", written=995.0)),
        ("hang_evaluation", report(0, place="evaluating", world_size=1)),
    ):
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / f"rank_{one.rank:05d}.json").write_text(one.to_json())
    call("hang-report", [str(tmp_path)])
    assert capsys.readouterr().out.startswith("no rank waits for another: it is evaluating (stages.py:12")
    call("hang-report", [str(tmp_path / "hang")])
    assert "rank 0 is saving" in (out := capsys.readouterr().out) or "it is saving" in out
    assert "rank 7" not in out and "rank 3: no report" in out


DAMAGED = {
    "torn": report(1).to_json().encode()[:70],
    "no text": b"\xff\xfe\x00",
    "other format": b'{"format": 99}',
    "other call": json.dumps({**json.loads(report(1).to_json()), "calls": [{"group": 1}]}).encode(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_foreign_files_are_passed_over_and_named(tmp_path, capsys, content):
    (tmp_path / "rank_00001.json").write_bytes(content)
    (tmp_path / "rank_00002.json").mkdir()
    with pytest.raises(UserError, match=r"has no report of a rank .*rank_00001.json is skipped: "):
        call("hang-report", [str(tmp_path)])
    (tmp_path / "rank_00000.json").write_text(WAITING[0].to_json())
    call("hang-report", [str(tmp_path)])
    said = capsys.readouterr()
    assert said.out.startswith(f"rank 0 waits in {CALL}; ranks 1-3 never arrived and wrote no report")
    assert said.err.count("is skipped: ") == 2


def test_without_reports_it_says_so(tmp_path):
    with pytest.raises(UserError, match="has no report of a rank"):
        call("hang-report", [str(tmp_path)])
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(UserError, match="there is no such directory"):
            call("hang-report", [str(tmp_path / name)])


def test_a_report_is_written_to_a_disk_that_finishes_no_flush(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_report, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(30))
    directory = ReportDir(tmp_path)
    assert directory.write(WAITING[1], "the calls")
    assert list(directory.reports(0.0)) == [1] and (tmp_path / "rank_00001.txt").read_text() == "the calls"


def watching(directory: Path, **limits: Any) -> Watchdog:
    return Watchdog(
        Identity(0, 2),
        Limits(**{"timeout": 60.0, "start_timeout": 60.0, **limits}),
        directory / "hang",
        end=lambda: None,
        progress=Progress(),
        record=CallRecord(),
    )


def test_a_job_that_was_stopped_as_a_whole_does_not_hang_when_it_goes_on(tmp_path):
    watchdog = watching(tmp_path)
    watchdog._progress.since -= 1000.0
    watchdog._worked = 0.0
    assert watchdog._quiet_seconds() == pytest.approx(1000.0, abs=5)
    watchdog._notice_sleep(watchdog._tick + 0.5)  # a machine with much to do
    assert watchdog._quiet_seconds() == pytest.approx(1000.0, abs=5)
    watchdog._notice_sleep(970.0)
    assert watchdog._quiet_seconds() == pytest.approx(31.0, abs=5)
    assert watchdog._seconds_without_record() == pytest.approx(31.0, abs=5)


def test_computing_counts_for_a_while(tmp_path):
    watchdog = watching(tmp_path)
    watchdog._work = SimpleNamespace(look=lambda **_: (True, False))
    watchdog._progress.since -= 170.0
    watchdog._progress.is_past_start = True
    assert watchdog._look_at_work() and watchdog._quiet_seconds() < 5
    watchdog._progress.since -= 20.0  # more than three time-outs
    assert not watchdog._look_at_work() and watchdog._computes
    assert watchdog._quiet_seconds() > 180
    watchdog._progress.is_past_start = False  # a start may take long
    assert watchdog._look_at_work()
    watchdog._progress.is_past_start = True
    watchdog._work = SimpleNamespace(look=lambda **_: (True, True))
    assert watchdog._look_at_work()  # it moves data


def test_a_thread_that_spins_for_its_card_does_not_work(tmp_path: Path):
    """Ranks agree before a step, in the place where data are read: the card answers when all have come."""
    progress, record = Progress(), CallRecord()
    limits = Limits(timeout=100.0, start_timeout=100.0, counts_work=False)
    watchdog = Watchdog(
        Identity(), limits, tmp_path / "hang", end=lambda: None, progress=progress, record=record
    )
    watchdog._work = SimpleNamespace(look=lambda **_: (True, False))
    progress.beat(READING)
    assert watchdog._look_at_work()

    task = SimpleNamespace(is_completed=lambda: False)
    gather = CallRecord.recorded(record, lambda group, *_: task, "all_gather")
    gather(object())
    assert capture_report(Identity(), progress, record, quiet=1.0, timeout=0.4, works=False).waits_for is None
    with record.reading():
        assert not watchdog._look_at_work()
        told = capture_report(Identity(), progress, record, quiet=1.0, timeout=0.4, works=False)
    assert told.waits_for.operation == "all_gather"
    assert watchdog._look_at_work()


def test_each_micro_batch_is_progress(monkeypatch):
    """A step may take longer than ``Engine.hang_timeout``: in training and in an evaluation."""
    import numpy as np

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.parallelize import parallelize
    from ppfleetx.resilience.progress import PROGRESS

    given = ["Global.local_batch_size=3", "Global.micro_batch_size=1", "Data.Train.dataset.input_dir=x"]
    cfg = load_config("debug/gpt_nano", given, world_size=1)
    runner = parallelize(build_module(cfg), cfg, ParallelContext.single(), train=True)
    ids = np.arange(9).reshape(1, 9)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": np.ones([1, 8], np.float32)}
    seen, loss = [], type(runner)._micro_loss

    def spy(runner, micro_batch):
        before, result = PROGRESS.since, loss(runner, micro_batch)
        seen.append(PROGRESS.since > before)
        return result

    monkeypatch.setattr(type(runner), "_micro_loss", spy)
    runner.train_step([batch] * 3, step=1, lr=0.0, weight_decay=0.0)
    runner.eval_step([batch] * 2)
    assert seen == [True] * 5


def test_a_rank_that_polls_waits_between_two_polls_as_well() -> None:
    record = CallRecord()
    poll = record.recorded(lambda group: None, "all_gather")
    main = threading.main_thread().ident
    record.recorded(lambda group: None, "all_reduce")(SimpleNamespace())
    with record.awaiting("none", polls=True):
        assert record.waited_for(main) is None  # nothing is polled yet
        poll(SimpleNamespace())
        assert record.waited_for(main).number == 0
    assert record.waited_for(main) is None


def test_a_rank_whose_own_thread_hangs_is_there_also_in_the_middle_of_a_poll() -> None:
    """Not in the collective by which the main thread asks the other ranks whether they are ready."""
    record, reports, end, job = CallRecord(), [], threading.Event(), SimpleNamespace()

    def report_of(group: object) -> None:
        reports.append(capture_report(Identity(), Progress(), record, quiet=9.0, timeout=1.0, works=False))

    poll = record.recorded(report_of, "all_gather")
    thread = threading.Thread(target=end.wait, args=(30,), name="helper_0")
    thread.start()
    with record.awaiting("helper", polls=True):
        poll(job)
        end.set()
        thread.join()
        poll(job)
    hangs, is_done = reports
    assert hangs.where.endswith(", in thread helper_0") and hangs.waits_for is None
    assert is_done.waits_for.number == 1


@pytest.mark.parametrize(
    ("what", "thread"), [("batch", "data_0"), ("copy", "checkpoint"), ("save", "checkpoint")]
)
def test_a_thread_that_keeps_the_program_waiting_is_named(
    what: str, thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end, reports = threading.Event(), threading.Event(), []

    def hangs() -> None:
        begun.set()
        assert end.wait(30)

    def late(act: Any) -> Any:
        return lambda *arguments: hangs() or act(*arguments)

    def look() -> None:
        begun.wait(30)
        deadline = time.monotonic() + 2
        while not RECORD.helper and time.monotonic() < deadline:
            time.sleep(0.01)
        reports.append(capture_report(Identity(), Progress(), RECORD, quiet=9.0, timeout=1.0, works=False))
        end.set()

    if what == "batch":
        loader = DataLoader(range(8), GlobalBatchSampler(8, 2, 2), num_workers=1)
        monkeypatch.setattr(loader, "_load", late(lambda indices: indices))
        wait = partial(next, iter(loader))
    else:
        owner, name = (HostCopier, "_copy") if what == "copy" else (storage, "write_safetensors")
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
        manager = BackgroundManager(tmp_path)
        live = [replace(piece, changes_with_update=True) for piece in slices()]
        manager.save(epoch=0, step=1, tensors=live, state={"step": 1})
        wait = manager.wait_for_copy if what == "copy" else manager.wait
    looking = threading.Thread(target=look)
    looking.start()
    wait()
    looking.join()
    if what == "copy":
        manager.wait()
    where = reports[0].where
    assert where.startswith("test_hangs.py:") and where.endswith(f" in hangs, in thread {thread}")
