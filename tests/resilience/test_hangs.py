"""The sentence that the reports of a job's ranks are joined into, and how it is read again."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError
from ppfleetx.resilience.activity import MEETING, READING, Progress
from ppfleetx.resilience.explain import explain, explain_alone
from ppfleetx.resilience.flight_recorder import CallRecord
from ppfleetx.resilience.hang_report import CallNote, Identity, Report, read_reports, take
from ppfleetx.resilience.report_dir import PRIVATE, ReportDir
from ppfleetx.resilience.watchdog import Limits, Watchdog

MP, PP = tuple(range(4)), (0, 4)
NAMES = {
    MP: ("the mp group [0..3]", 7),
    (*MP, 4): ("the tp group [0..4]", 7),
    PP: ("the pp group [0, 4]", 9),
}


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


def test_who_never_arrived_is_named_with_its_place():
    reading = report(3, place="reading data", where="npy.py:3 in load", counts={"7": 5})
    assert told(*WAITING, reading) == (
        f"ranks 0-2 wait in {CALL}; rank 3 never arrived: it is reading data (npy.py:3 in load) (step 7)"
    )


@pytest.mark.parametrize(
    ("peers", "killed", "said"),
    [
        ({}, 0, "its process cannot be seen from here (stopped, ended, or cut off from the others)"),
        ({3: "has ended"}, 0, "its process has ended"),
        (
            {3: "has ended"},
            1,
            "its process has ended; meanwhile the kernel has killed a process because memory ran out",
        ),
        ({3: "is stopped (SIGSTOP or Ctrl-Z)"}, 0, "its process is stopped (SIGSTOP or Ctrl-Z)"),
        (
            {3: ""},
            0,
            "its process runs, but not its Python threads (a call of C code that holds the interpreter)",
        ),
    ],
)
def test_of_a_silent_rank_the_others_know_what_the_kernel_says(peers, killed, said):
    reports = [report(rank, note(), peers=peers, killed_for_memory=killed) for rank in range(3)]
    assert (
        told(*reports)
        == f"ranks 0-2 wait in {CALL}; rank 3 never arrived and wrote no report: {said} (step 7)"
    )


def test_calls_that_differ_are_told_with_who_calls_what():
    other = report(3, note(shape=(2, 9)))
    assert told(*WAITING, other).startswith(
        f"rank 0 waits in {CALL}, and the calls differ: as number 5 ranks 0-2 call all_reduce with shape "
        "[2, 8] of float32, rank 3 calls all_reduce with shape [2, 9] of float32"
    )
    assert "rank 3 calls broadcast with" in told(*WAITING, report(3, note("broadcast")))
    gathers = [report(rank, note("all_to_all", shape=(rank, 2))) for rank in range(4)]
    assert "the messages do not get through" in told(*gathers)  # its parts may differ


def test_each_waits_for_the_other():
    before, other = note(number=4), note("all_gather", 1, PP)
    one = report(0, note(), counts={"7": 6, "9": 1}, world_size=5, calls=[before, note()])
    others = [report(rank, note(), world_size=5) for rank in (1, 2, 3)]
    crossed = report(4, other, counts={"7": 5, "9": 2}, world_size=5, calls=[before, other])
    waits = note(ranks=(*MP, 4))
    one, *others = [replace(each, waits_for=waits) for each in (one, *others)]
    assert told(one, *others, crossed) == (
        "rank 0 waits in all_reduce #5 of the tp group [0..4] (shape [2, 8], float32), rank 4 waits in "
        "all_gather #1 of the pp group [0, 4] (shape [2, 8], float32), so each waits for the other; the last "
        "that both called was all_reduce #4 of the mp group [0..3]; the ranks do not run the same operations "
        "in the same order: one was left out, or two are swapped (step 7)"
    )


def test_a_message_that_was_not_sent_is_missed_from_its_sender():
    receiver = report(4, note("recv", 3, PP, peer=0), world_size=5, counts={"9<0": 4})
    sender = report(
        0, place="saving a checkpoint", where="writer.py:9 in write", counts={"9>4": 3}, world_size=5
    )
    others = [report(rank, note(ranks=MP), world_size=5) for rank in (1, 2, 3)]
    sentence = told(sender, *others, receiver)
    assert "rank 4 waits in recv #3 from rank 0 in the pp group [0, 4]" in sentence
    assert "rank 0 never arrived: it is saving a checkpoint (writer.py:9 in write)" in sentence


def test_all_have_come_and_nothing_gets_through():
    reports = [report(rank, note(), host=f"node{rank // 2}") for rank in range(4)]
    assert told(*reports) == (
        f"ranks 0-3 wait in {CALL}, and all that take part have called it: the messages do not get through; "
        "the network between node0 and node1 is down, or one of its ends drops packets (step 7)"
    )


def test_a_rank_that_has_answered_that_it_is_not_done_is_missed():
    asking = [replace(one, waits_for=note(asks=True)) for one in WAITING]
    writing = report(
        3, place="saving a checkpoint", where="writer.py:9 in write"
    )  # it has answered meanwhile
    assert "rank 3 never arrived: it is saving a checkpoint" in told(*asking, writing)


def test_errors_that_ended_the_job_are_told_with_the_calls_in_which_the_others_were():
    mistake = report(3, place="reading data", where="npy.py:3 in load", failure="ValueError: bad sample")
    lost = [replace(one, failure="PeerLostError: rank 3 is gone", lost=True) for one in WAITING]
    sentence = (
        f"ranks 0-2 wait in {CALL}; rank 3 failed, reading data (npy.py:3 in load): ValueError: bad sample"
    )
    assert told(*lost, mistake) == f"{sentence} (step 7)"
    assert told(*lost) == f"ranks 0-2 wait in {CALL}; PeerLostError: rank 3 is gone (step 7)"
    failed = [replace(one, failure="OutOfStepError: x") for one in (*WAITING, report(3, note("reduce")))]
    assert "as number 5 ranks 0-2 call all_reduce with" in told(*failed)


def test_where_no_report_can_be_written_a_rank_says_nothing_of_the_others():
    assert explain_alone(WAITING[1]).sentence == (
        f"rank 1 waits in {CALL}; what the other ranks do is not known, because no report can be written "
        "(step 7)"
    )
    assert explain_alone(replace(WAITING[1], works=True)).goes_on == (1,)


def test_ranks_at_another_step_are_told():
    ahead = report(3, place="evaluating", counts={"7": 5}, step=8)
    assert told(*WAITING, ahead).endswith("; rank 3 is at step 8, the others at step 7")


def test_a_process_that_is_alone():
    alone = report(0, world_size=1, place="reading data", where="npy.py:3 in load")
    assert told(alone) == "no rank waits for another: it is reading data (npy.py:3 in load) (step 7)"


def test_a_rank_that_works_keeps_the_job():
    working = report(3, works=True, quiet_seconds=0.1, counts={"7": 5})
    assert explain({one.rank: one for one in (*WAITING, working)}).goes_on == (3,)
    endless = replace(working, works=False, computes=True, quiet_seconds=600.0)
    found = explain({one.rank: one for one in (*WAITING, endless)})
    assert found.goes_on == ()
    assert "in its step (stages.py:12 in forward), and has computed there for 600 s" in found.sentence


def test_a_report_is_read_as_it_was_written(tmp_path):
    written = report(2, note(), peers={3: "has ended"}, memory={"resident": 5}, stacks={"main": ["a", "b"]})
    (tmp_path / "rank_00002.json").write_text(written.to_json())
    (tmp_path / "rank_00003.json").write_text(written.to_json()[:50])  # torn by a full disk
    assert read_reports(tmp_path) == {2: written}
    assert read_reports(tmp_path, since=1000.5) == {}


def test_the_command_prints_sentence_and_ranks(tmp_path, capsys):
    (tmp_path / "hang").mkdir()
    for one in WAITING:
        (tmp_path / "hang" / f"rank_{one.rank:05d}.json").write_text(one.to_json())
    old = report(3, written=10.0)  # of an earlier hang of the run
    (tmp_path / "hang" / "rank_00003.json").write_text(old.to_json())
    call("hang-report", [str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"ranks 0-2 wait in {CALL}; rank 3 never arrived and wrote no report: ")
    assert lines[2] == (
        "rank 0 on node0, step 7: waits in all_reduce #5 of the mp group [0..3]; no progress for 600 s"
    )
    assert lines[5] == "rank 3: no report"
    call("hang-report", [str(tmp_path / "hang"), "--json"])
    told_again = json.loads(capsys.readouterr().out)
    assert told_again["sentence"] == lines[0]
    assert told_again["silent"] == [3]
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
    "empty": b"",
    "torn": report(1).to_json().encode()[:70],
    "no text": b"\xff\xfe\x00",
    "list": b"[]",
    "other format": b'{"format": 99}',
    "other words": json.dumps({**json.loads(report(1).to_json()), "written": "soon"}).encode(),
    "no such rank": report(9).to_json().encode(),
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


def test_a_disk_that_takes_only_a_little_takes_the_report_that_programs_read(tmp_path, monkeypatch):
    write = Path.write_text

    def full(path: Path, text: str, **more: Any) -> int:
        if ".txt" in path.name:
            write(path, text[:10], **more)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **more)

    monkeypatch.setattr(Path, "write_text", full)
    assert ReportDir(tmp_path).write(WAITING[1], "for people")
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00001.json"]


def test_a_directory_of_somebody_else_is_neither_read_nor_written(tmp_path, monkeypatch):
    """In a place where all may write: its links could lead anywhere."""
    own, other = ReportDir(tmp_path, PRIVATE), tmp_path / "other.txt"
    other.write_text("mine")
    (tmp_path / "summary.txt").symlink_to(other)
    (tmp_path / "rank_00001.json").write_text(WAITING[1].to_json())
    assert own.reports(0.0) and own.has_news(0.0)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert not own.reports(0.0) and not own.has_news(0.0) and not own.write(WAITING[0], "")
    own.write_summary("who is missing")
    own.clear()
    assert other.read_text() == "mine" and (tmp_path / "rank_00001.json").exists()


def test_asking_others_whether_they_are_done_is_no_progress():
    record = CallRecord()
    record.begin("all_reduce", object(), ())
    before = record.last_activity
    with record.asking():
        record.begin("all_gather", object(), ())
    assert record.last_activity == before
    assert record.begin("barrier", object(), ()).begun == record.last_activity > before


def test_the_call_that_failed_is_known_by_its_error():
    record, error = CallRecord(), ValueError("x")

    def fails(group: object, tensor: object) -> None:
        raise error

    with pytest.raises(ValueError, match="x"):
        record.recorded(fails, "reduce")(object(), None)
    assert record.failed.operation == "reduce"
    assert record.failed_with(error) and not record.failed_with(ValueError("x"))


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
    assert watchdog._quiet() == pytest.approx(1000.0, abs=5)
    watchdog._notice_sleep(watchdog._tick + 0.5)  # a machine with much to do
    assert watchdog._quiet() == pytest.approx(1000.0, abs=5)
    watchdog._notice_sleep(970.0)
    assert watchdog._quiet() == pytest.approx(31.0, abs=5)
    assert watchdog._silence() == pytest.approx(31.0, abs=5)


def test_computing_counts_for_a_while(tmp_path):
    watchdog = watching(tmp_path)
    watchdog._work = SimpleNamespace(look=lambda **_: (True, False))
    watchdog._progress.since -= 170.0
    watchdog._progress.is_under_way = True
    assert watchdog._look_at_work() and watchdog._quiet() < 5
    watchdog._progress.since -= 20.0  # more than three time-outs
    assert not watchdog._look_at_work() and watchdog._computes
    assert watchdog._quiet() > 180
    watchdog._progress.is_under_way = False  # a start may take long
    assert watchdog._look_at_work()
    watchdog._progress.is_under_way = True
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
    assert take(Identity(), progress, record, quiet=1.0, timeout=0.4, works=False).waits_for is None
    with record.reading():
        assert not watchdog._look_at_work()
        told = take(Identity(), progress, record, quiet=1.0, timeout=0.4, works=False)
    assert told.waits_for.operation == "all_gather"
    assert watchdog._look_at_work()


def test_a_thread_joins_the_card_before_it_asks_whether_something_is_done():
    """One that has not would make CUDA use card 0, for every process of the machine."""
    said, record = [], CallRecord()
    record.join_device = lambda: said.append("joins")
    task = SimpleNamespace(is_completed=lambda: said.append("asks") or False)
    CallRecord.recorded(record, lambda group, *_: task, "all_gather")(object())
    with record.reading():
        take(Identity(), Progress(), record, quiet=1.0, timeout=0.4, works=False)
    assert said[0] == "joins" and "asks" in said


def test_each_micro_batch_is_progress(monkeypatch):
    """A step may take longer than ``Engine.hang_timeout``: in training and in an evaluation."""
    import numpy as np

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.parallelize import parallelize
    from ppfleetx.resilience.activity import PROGRESS

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


def test_numbers_are_read_from_a_card_where_the_report_sees_it(monkeypatch):
    """All ranks agree before each step, and the step reads loss and norm: where a rank is missing, the others
    wait there."""
    import numpy as np
    import paddle

    from ppfleetx.distributed import together
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.resilience.flight_recorder import RECORD

    seen = []
    numpy = paddle.Tensor.numpy

    def spy(tensor):
        seen.append(RECORD.reads)
        return numpy(tensor)

    monkeypatch.setattr(paddle.Tensor, "numpy", spy)
    monkeypatch.setattr(
        paddle.distributed.stream, "all_gather", lambda received, own: paddle.assign(own, received)
    )
    assert together._all_gather(ParallelContext.single(), np.ones([2], np.int64)).tolist() == [[1, 1]]
    assert seen == [True] and not RECORD.reads


def test_progress_is_what_the_program_or_its_communication_does(tmp_path: Path):
    progress, record = Progress(), CallRecord()
    ended: list[bool] = []
    limits = Limits(timeout=0.4, start_timeout=0.4, counts_work=False)
    watchdog = Watchdog(
        Identity(),
        limits,
        tmp_path / "hang",
        end=lambda: ended.append(True),
        progress=progress,
        record=record,
    )
    progress.place = MEETING
    progress.since = 0.0
    assert watchdog._quiet() == 0.0  # ranks that meet have a limit of their own
    progress.place = "in its step"
    assert watchdog._quiet() < 10  # it has begun a moment ago
    record.begin("barrier", object(), ())
    assert watchdog._quiet() < 0.1
    quiet = take(Identity(), progress, record, quiet=1.0, timeout=0.4, works=False)
    assert quiet.waits_for.operation == "barrier"
    assert quiet.asks and not quiet.goes_on
