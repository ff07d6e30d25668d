"""`ppfleetx translate`: which toolkit it is, what is printed, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ppfleetx
from ppfleetx.commands.main import call
from ppfleetx.commands.translate import translation_of
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from tests.dialects.every_configuration import LLAMA, MINDSPEED, STAGES

SHIPPED = Path(ppfleetx.__file__).parent / "configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml"
GPT2 = Path(__file__).resolve().parents[2] / "projects/mindformers/configs/gpt2"


def test_a_file_is_written_and_never_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.yaml"
    call("translate", [str(GPT2 / "run_gpt2.yaml"), "--to", str(out)])
    assert f"written: {out}" in capsys.readouterr().out
    call("translate", [str(GPT2 / "run_gpt2.yaml")])
    assert capsys.readouterr().out == out.read_text()
    assert load_config(out).Model.num_layers == 12
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        call("translate", [str(GPT2 / "run_gpt2.yaml"), "--to", str(out)])


def test_arguments_behind_the_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = str(GPT2 / "run_gpt2.yaml"), tmp_path / "ours.yaml"
    call("translate", [file, "--", "--epochs", "7"])
    assert "num_train_epochs: 7  # argument 3, --epochs, runner_config.epochs" in capsys.readouterr().out
    call("translate", ["--", "python", "run_mindformer.py", "--config", file, "--to", str(out)])
    assert load_config(out).Engine.num_train_epochs == 3
    call("translate", ["--dialect", "mindformers", "--", "--config", file])
    assert "Translated from MindFormers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --nproc_per_node 8", "python -u -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7"],
)
def test_a_launcher_says_how_many_processes(launcher: str, tmp_path: Path) -> None:
    """In front of the program of each toolkit, which the file's options tell apart where two share a name."""
    (tmp_path / "spec.yaml").write_text(MINDSPEED.format(micro_batches=4, parallel=STAGES))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    flat = f"--model_name_or_path {tmp_path} --input_dir d --output_dir o --max_steps 5 --max_seq_length 16"
    lines = {
        "mindformers": f"run_mindformer.py --config {GPT2 / 'run_gpt2.yaml'} --use_parallel True",
        "mindspeed-core-ms": f"pretrain_gpt.py --yaml-cfg {tmp_path / 'spec.yaml'}",
        "paddleformers": f"run_pretrain.py {flat} --sharding stage1",
    }
    for name, line in lines.items():
        found = translation_of([*launcher.split(), *line.split()])
        assert found.dialect.lower() == name
        assert load_tree(found.tree(), found.warnings, world_size=8).plan.world_size == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a file, or give a command line"),
        (["none.yaml"], "there is no such file"),
        (["train.py"], "are not a command line of"),
        (["--what", "1"], "are not a command line of"),
        ([str(SHIPPED)], "is a configuration of this program already"),
    ],
)
def test_what_cannot_be_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translation_of(words)


def test_files_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("something: 1\n")
    with pytest.raises(ConfigError, match="say with --dialect whose it is"):
        translation_of([str(tmp_path / "a.yaml")])
    with pytest.raises(ConfigError, match="--dialect = 'what'"):
        translation_of([str(tmp_path / "a.yaml")], "what")
    with pytest.raises(ConfigError, match=r"something = 1|something \("):
        translation_of([str(tmp_path / "a.yaml")], "mindformers")
    with pytest.raises(ConfigError, match=r"Model\.hidden_size"):  # a translation has to be a configuration
        (tmp_path / "b.yaml").write_text("base_config: []\nseed: 1\n")
        call("translate", [str(tmp_path / "b.yaml")])
