"""What ``--nproc`` refuses before a rank is started."""

from __future__ import annotations

import pytest
from paddle.distributed.launch.context.device import Device

from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError
from ppfleetx.utils.cpu_launcher import name_devices
from ppfleetx.utils.end_processes import LAUNCHER

NANO = ("-c", "debug/gpt_nano", "--nproc", "2")
TWO_NODES = ("--nnodes", "2", "--master", "10.0.0.1:8765")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runpy.run_module", lambda *args, **options: pytest.fail("the ranks were started"))
    monkeypatch.setattr("ppfleetx.utils.cpu_launcher.prepare", lambda options: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", *NANO, "-o", "Model.nope=1"], "Model.nope (-o override 1)"),
        (["train", *NANO, "-o", "Distributed.mp_degree=4"], "2 processes were started"),
        (["train", *NANO, *TWO_NODES, "-o", "Distributed.mp_degree=8"], "4 processes were started"),
        (["eval", *NANO, "-o", "Global.seed=x"], "Global.seed = 'x'"),
        (["infer", *NANO, "-o", "Distributed.mp_degree=x"], "Distributed.mp_degree = 'x'"),
        (["generate", "nowhere", "x", "--nproc", "2"], "there is no directory nowhere; "),
        (["finetune", "--from", "no/w/here", "--devices", "0,1"], "there is no directory no/w/here"),
        (["train", *NANO, "--nnodes", "2"], "--nnodes = 2: "),
        (["train", "-c", "debug/gpt_nano", "--devices", "a,b"], "--devices = 'a,b': "),
        (["eval", *NANO, "--devices", ""], "--devices = '': "),
        (["train", *NANO, "--log-dir", __file__], "--log-dir = "),
        (["doctor", *NANO, "--log-dir", f"{__file__}/log"], "--log-dir = "),
    ],
)
def test_what_every_rank_would_say_is_said_once(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        call(words[0], words[1:])
    assert said in str(caught.value)


def test_check_starts_no_ranks_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    call("train", [*NANO, "--check"])
    assert "plan           dp 2," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cards", "options", "said"),
    [
        ("0", ["--nproc", "2"], ["--nproc = 2", "1 card (0)", "give --nproc 1"]),
        ("0,1", ["--nproc", "3"], ["--nproc = 3", "2 cards (0, 1)"]),
        ("0,1,2,3", ["--nproc", "3", "--devices", "1,2"], ["--nproc = 3", "--devices names 2 cards (1, 2)"]),
        ("0,1", ["--devices", "1,2"], ["--devices = '1,2'", "no card 2", "0, 1"]),
    ],
)
def test_fewer_cards_than_ranks(
    monkeypatch: pytest.MonkeyPatch, cards: str, options: list[str], said: list[str]
) -> None:
    monkeypatch.setattr(Device, "parse_device", lambda: Device("gpu", labels=cards.split(",")))
    with pytest.raises(UserError) as caught:
        call("train", ["-c", "debug/gpt_nano", *options])
    assert all(piece in str(caught.value) for piece in said)


@pytest.mark.parametrize(
    ("visible", "options", "then"),
    [
        ("", ["--nproc_per_node", "2"], None),
        ("0", ["--nproc_per_node=2"], None),
        ("4,5", ["--nproc_per_node", "2"], "4,5"),
        ("0,1", ["--devices", "2,3"], "2,3"),
    ],
)
def test_a_cpu_has_as_many_devices_as_ranks(visible: str, options: list[str], then: str | None) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    name_devices([LAUNCHER, *options, "train.py"], environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == then
