"""What must be equal on all processes, and the words for what is not."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppfleetx.doctor import files, rank_agreement
from ppfleetx.doctor.rank_agreement import Fact, agreement_rows, differing, digests, read_facts
from ppfleetx.doctor.results import Status, Target
from tests.doctor.conftest import by_name, write_corpus


def rows_of(cases):
    """The rows for processes that are these cases."""
    return compared([read_facts(target, print) for target in cases])


def compared(facts):
    return by_name(agreement_rows(dict(enumerate(facts)), differing([digests(one) for one in facts])))


def test_equal_processes_agree(target):
    rows = rows_of([target(environ={}), target(rank=1, local_rank=1, environ={})])
    assert {row.status for row in rows.values()} == {Status.OK}


@pytest.mark.parametrize(
    ("one", "other", "status"),
    [
        ({"NCCL_SOCKET_IFNAME": "eth0", "HCCL_IF_IP": "a"}, {"NCCL_SOCKET_IFNAME": "eth1"}, Status.OK),
        ({"NCCL_DEBUG": "INFO"}, {}, Status.OK),
        ({"FLAGS_selected_npus": "0"}, {"FLAGS_selected_npus": "1"}, Status.OK),
        ({"HCCL_BUFFSIZE": "120"}, {"HCCL_BUFFSIZE": "200"}, Status.FAIL),
    ],
)
def test_variables_of_a_rank_or_a_machine_are_its_own(one, other, status):
    facts = [read_facts(Target(environ=environ), print) for environ in (one, other)]
    assert compared(facts)["variables"].status is status


def test_another_seed_other_data_and_other_variables_are_named(target, prefix):
    one = target(environ={"NCCL_IB_DISABLE": "1"})
    facts = [read_facts(one, print)]
    other = replace(target("Global.seed=7", environ={}), rank=1)
    write_corpus(prefix, seed=1)
    rows = compared([*facts, read_facts(other, print)])
    assert rows["configuration"].status is rows["data and tokenizer"].status is Status.FAIL
    assert "Global.seed is 1024 on rank 0, 7 on rank 1" in rows["configuration"].found
    assert f"{prefix} is " in rows["data and tokenizer"].found
    assert rows["variables"].status is Status.FAIL
    assert rows["variables"].found == "NCCL_IB_DISABLE is 1 on rank 0, nothing on rank 1"
    assert rows["versions"].status is Status.OK


def test_another_checkpoint_on_one_machine_is_found(target, tmp_path):
    places = [tmp_path / name for name in ("one", "other")]
    for number, place in enumerate(places):
        step = place / f"step_{number}"
        step.mkdir(parents=True)
    rows = rows_of([target(f"Engine.save_load.init_from={places[0]}"), target(rank=2)])
    assert rows["checkpoints"].status is Status.FAIL and "init_from is" in rows["checkpoints"].found


def test_a_change_anywhere_in_a_corpus_without_checksums_is_found(prefix):
    Path(f"{prefix}.checksums.json").unlink()
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.write(bytes(3 << 20))
    corpus = SimpleNamespace(prefix=str(prefix), fingerprint="the same")
    before = files._of_corpus(corpus)
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"x")
    assert files._of_corpus(corpus) != before


def test_other_versions_and_sources_are_named(target, monkeypatch, tmp_path):
    facts = [read_facts(target(), print), read_facts(target(rank=1, local_rank=1), print)]
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn/mlp.py").write_text("x = 1\n")
    monkeypatch.setattr(rank_agreement, "_PACKAGE", tmp_path)
    monkeypatch.setattr(rank_agreement, "__version__", "0.0.9")
    rows = compared([*facts, read_facts(target(rank=2), print)])
    assert "ppfleetx is 0.1.0 on ranks 0, 1, 0.0.9 on rank 2" in rows["versions"].found
    assert "more" in rows["sources"].found and "on rank 2" in rows["sources"].found


def test_what_nobody_could_read_in_time_is_not_said_to_be_equal(target, monkeypatch):
    monkeypatch.setattr(rank_agreement, "_READ_SECONDS", 0.2)
    released, cases, asked = threading.Event(), [target(), target(rank=1)], []
    slow = Fact("data and tokenizer", lambda target: {"corpus": str(released.wait(20.0))}, "copy it")
    monkeypatch.setattr(rank_agreement, "FACTS", (slow,))
    row = compared([read_facts(one, asked.append) for one in cases])["data and tokenizer"]
    assert asked == ["data and tokenizer"] * 2 and row.status is Status.WARN
    assert row.found == "not compared: ranks 0, 1 could not read it within 0.2 s"
    released.set()
