"""Shipped configurations by name: what `-c` finds, what `ppfleetx configs` lists and copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.commands.main import call
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.shipped import CONFIGS, find_config, purpose, shipped_configs
from ppfleetx.config.yaml_dump import dump_config

SHIPPED = "gpt/pretrain_gpt_345M_single_card"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "given",
    [SHIPPED, f"{SHIPPED}.yaml", f"nlp/{SHIPPED}", f"ppfleetx/configs/nlp/{SHIPPED}.yaml", SHIPPED[4:]],
)
def test_a_name_is_the_shipped_file(given: str) -> None:
    assert find_config(given) == CONFIGS / f"nlp/{SHIPPED}.yaml"
    assert load_config(given).Model.hidden_size == 1024


def test_a_real_file_of_that_name_wins(tmp_path: Path) -> None:
    mine = tmp_path / SHIPPED
    mine.parent.mkdir()
    mine.write_text("_base_: ppfleetx.yaml\n")
    assert find_config(SHIPPED) == Path(SHIPPED)
    with pytest.raises(ConfigError, match=r"_base_ = 'ppfleetx.yaml'.*no such file"):
        load_config(SHIPPED)
    mine.unlink()
    mine.symlink_to("nowhere")  # a link to nowhere is the user's too
    with pytest.raises(ConfigError, match=f"{SHIPPED}: there is no such file"):
        load_config(SHIPPED)


@pytest.mark.parametrize("given", ["gpt/pretrain_gpt_345M", "345m_single_card", "pretrain_gpt_1.3b"])
def test_an_unknown_name_lists_the_nearest(given: str) -> None:
    with pytest.raises(ConfigError, match=r"no configuration of this name.*The nearest are gpt/\w+_gpt_"):
        load_config(given)


@pytest.mark.parametrize("given", ["nowhere.yaml", "/nowhere/gpt/x"])
def test_what_looks_like_a_file_is_one(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert "ships with" not in str(caught.value)


def test_the_list_has_size_cards_and_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    call("configs", [])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "CARDS", "PURPOSE"]
    assert [row.split()[0] for row in rows] == list(shipped_configs())
    row = next(row for row in rows if "175B" in row)
    assert row.split()[1:4] == ["174.6", "B", "128"] and "16 pipeline stages" in row
    assert all(10 < len(purpose(path)) < 110 for path in shipped_configs().values())


@pytest.mark.parametrize("name", shipped_configs())
def test_a_copy_says_what_the_shipped_file_says(name: str, tmp_path: Path) -> None:
    call("configs", ["copy", name, "mine"])
    copy = tmp_path / "mine" / f"{name.rpartition('/')[2]}.yaml"
    assert dump_config(load_config(copy)) == dump_config(load_config(name))
    assert not any("../" in path.read_text() for path in (tmp_path / "mine").rglob("*.yaml"))


def test_a_copy_overwrites_nothing(tmp_path: Path) -> None:
    call("configs", ["copy", SHIPPED, "mine"])
    call("configs", ["copy", "gpt/pretrain_gpt_1.3B_dp8", "mine"])  # shares a base with the first
    base = tmp_path / "mine/_base_/pretrain.yaml"
    base.write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"pretrain.yaml already exists.*nothing was copied"):
        call("configs", ["copy", "gpt/pretrain_gpt_13B_dp8", "mine"])
    assert base.read_text() == "# mine\n" and not (tmp_path / "mine/pretrain_gpt_13B_dp8.yaml").exists()
    with pytest.raises(ConfigError, match="no configuration of this name"):
        call("configs", ["copy", "gpt/nothing", "other"])
    assert not (tmp_path / "other").exists()
