"""Length, batch, learning rate and logging of finetuning where nobody says otherwise; and `--max-steps`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ppfleetx.checkpoint.run_ownership import RunRecord, write_run
from ppfleetx.commands.finetune_defaults import finetuning_defaults, up_to, without_own_base
from ppfleetx.commands.main import call
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.overrides import Setting
from tests.checkpoint.checkpoints import OWN, save

MODEL = {
    "vocab_size": 64,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 32,
}
CHATS = ["Data.Train.dataset.name=ChatDataset", "Data.Train.dataset.split=train"]
LORA = "Model.lora.rank=8"
# A pretraining's own course, whose lengths and rates are none of a finetuning's.
PRETRAINED = {
    "Optimizer": {"lr": {"max_lr": 1.5e-3, "min_lr": 1e-4, "warmup_steps": 2000, "decay_steps": 9000}}
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(directory: Path, **sections: dict) -> Path:
    path = directory / "config.yaml"
    sizes = {"local_batch_size": 3, "micro_batch_size": 3}
    path.write_text(yaml.safe_dump({"Global": sizes, "Model": MODEL, **sections}))
    return path


@pytest.mark.parametrize("own", [{}, PRETRAINED], ids=["none", "a pretraining's"])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"Engine.run_mode": "epoch", "Engine.num_train_epochs": 3, "Engine.logging_freq": 10}),
        ([], {"Global.local_batch_size": 9, "Global.micro_batch_size": 3}),
        ([], {"Optimizer.lr.max_lr": 5e-5, "Optimizer.lr.min_lr": 0, "Optimizer.lr.warmup_rate": 0.03}),
        ([LORA], {"Optimizer.lr.max_lr": 5e-4, "Optimizer.lr.warmup_steps": None}),
        ([LORA, "Optimizer.lr.max_lr=0.1"], {"Optimizer.lr.max_lr": 0.1}),
        (["Optimizer.lr={max_lr: 0.1}"], {"Optimizer.lr.max_lr": 0.1}),
        (["Optimizer.lr.warmup_steps=7", "Engine.max_steps=9"], {"Optimizer.lr.warmup_rate": None}),
        (["Optimizer.lr.name=CosineAnnealingWithWarmupDecay"], {"Optimizer.lr.decay_style": "cosine"}),
        (["Engine.num_train_epochs=5"], {"Engine.run_mode": "epoch", "Engine.num_train_epochs": 5}),
        (["Engine.run_mode=step"], {"Engine.run_mode": "step"}),
        (["Engine.max_steps=60"], {"Engine.run_mode": "step", "Engine.logging_freq": 5}),
        (["Engine.max_steps=7"], {"Engine.max_steps": 7, "Engine.logging_freq": 1}),
        (["Engine.logging_freq=3"], {"Engine.logging_freq": 3}),
        (["Engine.accumulate_steps=1"], {"Global.local_batch_size": 3}),
        (["Global.global_batch_size=6", "Global.local_batch_size=6"], {"Global.local_batch_size": 6}),
    ],
)
def test_defaults(tmp_path: Path, own: dict, given: list[str], expected: dict) -> None:
    """What nobody has given is finetuning's, also where a pretraining has chosen; what is given holds."""
    path = write(tmp_path, **own)
    given = [*CHATS, *given]
    cfg = load_config(path, [*given, *finetuning_defaults(path, given)])
    for key, value in expected.items():
        found = cfg
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_an_evaluation_comes_after_each_pass(config: Path) -> None:
    given = [*CHATS, "Data.Eval.dataset.name=ChatDataset", "Data.Eval.dataset.split=dev"]
    assert load_config(config, [*given, *finetuning_defaults(config, given)]).Engine.eval_freq == 1


def test_more_steps_go_on_with_the_run_that_is_there(config: Path, tmp_path: Path) -> None:
    given = [f"Engine.save_load.output_dir={tmp_path / 'run'}"]
    options = load_config(config, [*given, *up_to(20, config, given)]).Engine
    assert (options.max_steps, options.save_load.resume) == (20, False)
    save(tmp_path / "run", step=10, run=OWN)
    write_run(tmp_path / "run", RunRecord(OWN))
    for more in ([], ["Engine.run_mode=epoch"]):
        options = load_config(config, [*given, *more, *up_to(20, config, [*given, *more])]).Engine
        assert (options.max_steps, options.save_load.resume) == (20, "auto")
        assert options.save_load.lr_schedule == "config"
        assert not more or options.num_train_epochs == 20
    anew = [*given, "Engine.save_load.overwrite=True"]
    assert not load_config(config, [*anew, *up_to(20, config, anew)]).Engine.save_load.resume


def test_adapters_alone_begin_anew_beside_their_base(config: Path, tmp_path: Path) -> None:
    """`finetune --from BASE -o Model.lora.base=BASE`: BASE holds no adapters to start from."""
    for name in ("base", "other"):
        save(tmp_path / name, step=1)
    start = Setting("Engine.save_load.init_from", tmp_path / "base/epoch_0_step_1", "--from")
    for base, left in (("base", None), ("other", start.value), ("nowhere", start.value)):
        given = [start, LORA, f"Model.lora.base={tmp_path / base}"]
        cfg = load_config(config, without_own_base(config, given))
        assert cfg.Engine.save_load.init_from == (left if left is None else str(left)), base
    assert without_own_base(config, [start, LORA]) == [start, LORA]


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_steps_are_counted_from_one(verb: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        call(verb, ["--from", "x", "--max-steps", "0"] if verb == "finetune" else ["--max-steps", "0"])
    assert ended.value.code == 2
    assert "--max-steps: must be a whole number" in capsys.readouterr().err
