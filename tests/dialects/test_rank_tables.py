"""Rank tables, and what run_distribute.sh starts for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.mindformers import rank_table
from ppfleetx.dialects.mindformers.rank_table import (
    merged,
    read_rank_table,
    table_of_host,
    this_host,
    write_rank_table,
)

PROJECT = Path(__file__).resolve().parents[2] / "projects/mindformers"
CONFIG = PROJECT / "configs/gpt2/run_gpt2_13b.yaml"
HOSTS = [f"10.155.111.{140 + number}" for number in range(4)]


def table_file(directory: Path, hosts: int, devices: int = 8) -> Path:
    table = merged([table_of_host(range(devices), address) for address in HOSTS[:hosts]])
    path = directory / "table.json"
    write_rank_table(path, table)
    return path


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_table, "expected_device", lambda wanted: "cpu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("node", range(4))
def test_four_hosts_of_eight(tmp_path: Path, node: int) -> None:
    path = table_file(tmp_path, 4)
    ranks = f"[{8 * node},{8 * node + 8}]"
    found = rank_table.launch_of([str(path), str(CONFIG), ranks, "train", "32"], {"MASTER_PORT": "7000"})
    words = " ".join(found.launcher)
    assert f"--nnodes 4 --rank {node} --master {HOSTS[0]}:7000 --host {HOSTS[node]}" in words
    assert "--nproc_per_node 8" in words
    assert found.program == (f"--config={CONFIG}", "--use_parallel=True", "--run_mode=train")
    four = rank_table.launch_of([str(path), str(CONFIG), ranks, "train"], {"MASTER_PORT": "7000"})
    assert four.program == found.program and "--nnodes 4" in " ".join(four.launcher)


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "--nproc_per_node 4"), ("gpu", "--devices 4,5,6,7")]
)
def test_some_devices_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, expected: str
) -> None:
    monkeypatch.setattr(rank_table, "expected_device", lambda wanted: device)
    found = rank_table.launch_of([str(table_file(tmp_path, 1)), str(CONFIG), "[4,8]", "finetune"], {})
    words = " ".join(found.launcher)
    assert expected in words and "--nnodes" not in words


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("hosts", "arguments", "words"),
    [
        (4, ["[0,8]"], "takes four or five arguments, not 3. usage: bash run_distribute.sh"),
        (4, ["[0,16]", "train", "32"], "must be the ranks of one host: [0,8] is 10.155.111.140"),
        (4, ["[8,16]", "train", "16"], "RANK_SIZE = '16': the rank table has 32 ranks"),
        (4, ["[8,16]", "train", "x"], "RANK_SIZE = 'x'"),
        (1, ["[8,16]", "train"], "the rank table has no device 8, but 0, 1, 2"),
        (1, ["8", "train"], "must be a range such as [0,8]"),
        (1, ["[8,8]", "train"], "is empty"),
        (1, ["[0,8]", "test"], "RUN_MODE = 'test': must be one of train, finetune, eval, predict"),
    ],
)
def test_wrong_arguments(tmp_path: Path, hosts: int, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        rank_table.launch_of([str(table_file(tmp_path, hosts)), str(CONFIG), *arguments], {})
    assert words in str(error.value)


def renumber(devices: list[dict[str, str]]) -> None:
    for number, device in enumerate(devices):
        device["rank_id"] = str(number)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table, one, other: table.update(server_count="3"), "server_count = 3"),
        (lambda table, one, other: table.update(status="initializing"), "must be 'completed'"),
        (lambda table, one, other: other["device"][0].update(rank_id="7"), "rank_id ("),
        (lambda table, one, other: other["device"][-1].update(rank_id="16"), "rank_id ("),
        (lambda table, one, other: renumber(other["device"]), "merge_hccl.py"),
        (lambda table, one, other: other.update(server_id=one["server_id"]), f"server_id = '{HOSTS[0]}'"),
        (lambda table, one, other: table["server_list"].reverse(), "in the order of the hosts"),
        (lambda table, one, other: other["device"].pop(), f"{HOSTS[0]} 8, {HOSTS[1]} 7"),
        (lambda table, one, other: other["device"].clear(), "server_list.1.device = []"),
        (lambda table, one, other: other["device"][3].update(device_id="2"), "device_id = 2"),
        (lambda table, one, other: other["device"][0].update(rank_id="-1"), "device.0.rank_id = '-1'"),
    ],
)
def test_wrong_tables(tmp_path: Path, change: Callable[..., None], words: str) -> None:
    path = table_file(tmp_path, 2)
    table = json.loads(path.read_text())
    change(table, *table["server_list"])
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as error:
        rank_table.launch_of([str(path), str(CONFIG), "[0,8]", "train"], {})
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"server_list": [1]}', '{"server_list": {}}'])
def test_what_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ConfigError):
        read_rank_table(tmp_path / "table.json")


def script(directory: Path, name: str, *words: str) -> tuple[int, str]:
    """Run a script of the project; its exit code and what it wrote to stderr."""
    command = [sys.executable, PROJECT / name, *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_the_tools_make_and_merge_tables(tmp_path: Path) -> None:
    tools = "mindformers/tools"
    for address in HOSTS[:2]:
        words = ("--device_num", "[0,8)", "--server_ip", address)
        assert script(tmp_path, f"{tools}/hccl_tools.py", *words) == (0, "")
    parts = [f"hccl_8p_01234567_{address}.json" for address in HOSTS[:2]]
    assert script(tmp_path, f"{tools}/merge_hccl.py", *parts) == (0, "")
    content = json.loads((tmp_path / "hccl_2s_16p.json").read_text())
    assert (content["version"], content["server_count"], content["status"]) == ("1.0", "2", "completed")
    assert [one["server_id"] for one in content["server_list"]] == HOSTS[:2]
    first = content["server_list"][1]["device"][0]
    assert first == {"device_id": "0", "device_ip": HOSTS[1], "rank_id": "8"}
    assert content["server_list"][0]["host_nic_ip"] == "reserve"
    (tmp_path / "hccl_2s_16p.json").write_text("mine")
    code, said = script(tmp_path, f"{tools}/merge_hccl.py", *parts)
    assert code == 2 and "nothing is overwritten" in said


def test_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    table = table_file(tmp_path, 1)
    code, said = script(tmp_path, "scripts/run_distribute.py", str(table), str(CONFIG), "[0,8]", "train")
    assert code == 2 and "8 processes were started" in said, said
    assert said.count("\n") == 1 and not list(tmp_path.glob("mf_parallel*"))


def test_this_host_has_an_address() -> None:
    try:
        assert not this_host().startswith("127.")
    except ConfigError as error:  # a machine without a network
        assert "--server_ip" in str(error)
