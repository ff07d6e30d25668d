"""Rows, the table of checks, and what becomes of a check that fails or does not end."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from ppfleetx.doctor import operators, registry
from ppfleetx.doctor.operators import kernels_row, registered, used_by, used_on_cpu
from ppfleetx.doctor.registry import CHECKS, Check, Each, Need, examine
from ppfleetx.doctor.results import Row, Status, Target, as_json, as_table, fail, joined, ok, skipped, warn
from ppfleetx.utils.gpu_operators import Kernel


def planted(monkeypatch, function, **options) -> Check:
    """A check that is ``function``."""
    module = SimpleNamespace(function=function)
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)
    return Check("group", "module", "function", "title", **options)


def test_every_check_of_the_table_is_there_and_skips_with_a_reason():
    for check in CHECKS:
        if check.need is Need.CARD:
            (row,) = examine(check, Target(device="cpu"))
            assert row.status is Status.SKIPPED and "no card" in row.found
        else:
            assert callable(check.load())


@pytest.mark.parametrize(
    ("found", "reason"),
    [((), "no configuration was given"), ((fail("configuration", "wrong", "mend it"),), "could not be read")],
)
def test_what_needs_a_configuration_says_why_there_is_none(found, reason):
    (row,) = examine(Check("group", "module", "function", "title", Need.CONFIG), Target(found=found))
    assert row.status is Status.SKIPPED and reason in row.found


def test_a_check_that_raises_is_a_row_and_not_the_end(monkeypatch):
    def broken(target):
        yield ok("one", "fine")
        raise RuntimeError("a\n----\nError Message Summary:\n----\nPreconditionNotMetError: no card")

    (row,) = examine(planted(monkeypatch, broken), Target())
    assert row.status is Status.FAIL and row.fix
    assert row.found == "RuntimeError: PreconditionNotMetError: no card"


def test_a_check_that_does_not_end_is_given_up(monkeypatch):
    never = threading.Event()
    (row,) = examine(planted(monkeypatch, lambda target: never.wait(5.0), seconds=0.1), Target())
    assert row.status is Status.FAIL and "no answer within 0 s" in row.found
    never.set()


def test_who_runs_a_check():
    first, second = Target(local_rank=0), Target(local_rank=1, device="gpu")
    node, rank = (Check("g", "m", "f", "t", each=each) for each in (Each.NODE, Each.RANK))
    card = Check("g", "m", "f", "t", each=Each.CARD)
    assert [check.is_for(second) for check in (node, rank, card)] == [False, True, True]
    assert all(check.is_for(first) for check in (node, rank, card))
    assert not card.is_for(Target(local_rank=1))


def test_rows_of_ranks_that_are_alike_are_one():
    same, well = ok("python", "3.11"), ok("data", "read")
    other = fail("data", "not readable", "mount it")
    rows = joined([[well, same], [other, same], [well, same], [other, same]])
    assert [row.ranks for row in rows] == [(0, 2), (1, 3), ()]
    text = as_table(rows)
    assert "not readable [ranks 1, 3]" in text and "fix: mount it" in text
    assert text.endswith("1 check failed: 2 ok, 1 fail")
    content = json.loads(as_json(rows, 4))
    assert content["ok"] is False and content["counts"]["fail"] == 1
    assert [Row.from_json(row) for row in content["rows"]] == rows
    assert json.loads(as_json([warn("a", "b", "c"), skipped("d", "e")], 1))["ok"]


def test_a_kernel_that_the_build_lacks_is_named():
    keys = ["(GPU, Undefined(AnyLayout), float32)", "(CPU, Undefined(AnyLayout), bfloat16)"]
    kernels = {"gelu": Kernel(("bfloat16", "float32"), ()), "argsort": Kernel(("int64",), ())}
    row = kernels_row("GPU", {"gelu": keys}, used_by(Target(), kernels), ("GPU",))
    assert row.status is Status.FAIL
    assert row.found.startswith("2 of 3") and "argsort (int64), gelu (bfloat16)" in row.found
    assert kernels_row("CPU", {"gelu": keys}, {"gelu": ["bfloat16"]}, ("CPU",)).status is Status.OK
    assert used_on_cpu(kernels)["gelu"] == ["float32"]
    assert used_by(Target(), {"swiglu": Kernel(("float32",), ())}) == {}  # plain operators take its place


@pytest.mark.parametrize(
    ("keys", "status"),
    [
        (["(npu, Undefined(AnyLayout), int64)"], Status.OK),
        (["(CUSTOM, Undefined(AnyLayout), int64)"], Status.OK),
        (["(CPU, Undefined(AnyLayout), int64)"], Status.WARN),
        (["(GPU, Undefined(AnyLayout), int64)"], Status.FAIL),
    ],
)
def test_what_another_card_lacks_the_host_computes_if_it_can(monkeypatch, keys, status):
    kernels = {"argsort": Kernel(("int64",), ()), "flash_attn": Kernel(("float32",), ())}
    monkeypatch.setattr(operators, "used_kernels", lambda: kernels)
    row = operators.card_row(Target(device="npu:1"), {"argsort": keys})
    assert row.status is status and row.name == "kernels of the npu"


def test_the_installed_paddle_has_all_that_a_cpu_runs():
    rows = list(registered(Target()))
    assert {row.status for row in rows} == {Status.OK}
    assert rows[0].numbers["pairs"] > 100
