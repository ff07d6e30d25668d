"""What must be equal on all processes, and the words for what is not."""

from __future__ import annotations

from dataclasses import replace

from ppfleetx.doctor import agreement
from ppfleetx.doctor.agreement import agreement_rows, differing, digests, in_full
from ppfleetx.doctor.rows import Status
from tests.doctor.conftest import by_name, write_corpus


def rows_of(cases, **patches):
    """The rows for processes that are these cases."""
    told = [digests(case) for case in cases]
    names = differing(told)
    values = {rank: in_full(case, names) for rank, case in enumerate(cases)}
    return by_name(agreement_rows(values, names))


def test_equal_processes_agree(case):
    one = case(environ={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"})
    other = case(rank=1, local_rank=1, environ={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth1"})
    assert {row.status for row in rows_of([one, other]).values()} == {Status.OK}


def test_another_seed_other_data_and_other_variables_are_named(case, prefix):
    one = case(environ={"NCCL_IB_DISABLE": "1"})
    told, full = digests(one), in_full(one, [fact.name for fact in agreement.FACTS])
    other = replace(case("Global.seed=7", environ={}), rank=1)
    write_corpus(prefix, seed=1)
    names = differing([told, digests(other)])
    rows = by_name(agreement_rows({0: full, 1: in_full(other, names)}, names))
    assert rows["configuration"].status is rows["data and tokenizer"].status is Status.FAIL
    assert "Global.seed is 1024 on rank 0, 7 on rank 1" in rows["configuration"].found
    assert f"{prefix} is " in rows["data and tokenizer"].found
    assert rows["variables"].status is Status.WARN
    assert rows["variables"].found == "NCCL_IB_DISABLE is 1 on rank 0, nothing on rank 1"
    assert rows["versions"].status is Status.OK


def test_other_versions_and_sources_are_named(case, monkeypatch, tmp_path):
    cases = [case(), case(rank=1, local_rank=1), case(rank=2)]
    names = ["versions", "sources"]
    told, full = [digests(one) for one in cases[:2]], in_full(cases[0], names)
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn/mlp.py").write_text("x = 1\n")
    monkeypatch.setattr(agreement, "_PACKAGE", tmp_path)
    monkeypatch.setattr(agreement, "__version__", "0.0.9")
    told.append(digests(cases[2]))
    assert differing(told) == names
    rows = by_name(agreement_rows({0: full, 1: in_full(cases[1], names), 2: in_full(cases[2], names)}, names))
    assert "ppfleetx is 0.1.0 on rank 0, 0.0.9 on rank 2" in rows["versions"].found
    assert "more" in rows["sources"].found and "on rank 2" in rows["sources"].found
