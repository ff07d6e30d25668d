"""A resume that changes what is computed is refused or says so, in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import TRAIN, Tool, environment, losses, records
from tests.helpers import programs

FEW = ("Engine.eval_freq=0", "Data.Train.dataset.eod_id=511")
TOLD = "computes something else than the one that saved"


@pytest.fixture(scope="module")
def saved(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of a run of 8 steps with checkpoints after 4 and 8."""
    output_dir = tmp_path_factory.mktemp("saved")
    tool.ok(output_dir, *FEW)
    return output_dir


@pytest.fixture
def resume(tool: Tool, saved: Path, tmp_path: Path) -> Callable[..., str]:
    """``resume(*overrides)`` into ``tmp_path``, from step 4; what was printed."""
    start = f"Engine.save_load.ckpt_dir={saved}/epoch_0_step_4"
    return lambda *overrides: tool.ok(tmp_path, *FEW, start, *overrides).stdout


def test_what_changes_is_named_in_one_line(resume: Callable[..., str], saved: Path, tmp_path: Path) -> None:
    said = resume(
        "Data.Train.dataset.reset_attention_mask=True",
        "Optimizer.beta2=0.95",
        "Optimizer.lr.max_lr=2e-3",
        "Engine.save_load.lr_schedule=checkpoint",
    )
    [line] = [line for line in said.splitlines() if TOLD in line]
    assert line.endswith(
        "epoch_0_step_4: Data.Train.dataset.reset_attention_mask = True (was False), "
        "Optimizer.beta2 = 0.95 (was 0.999)"
    )
    assert "of the checkpoint is kept (max_lr: 0.002 now, 0.001 saved)" in said
    assert losses(tmp_path) != losses(saved)[4:]


def test_nothing_is_said_where_nothing_changes(resume: Callable[..., str]) -> None:
    assert TOLD not in resume("Global.micro_batch_size=4", "Model.use_recompute=True")


def test_the_best_result_of_another_evaluation_is_forgotten(tool: Tool, tmp_path: Path) -> None:
    keys = ("Engine.eval_freq=2", "Engine.save_load.save_steps=2", "Engine.save_load.keep_best=loss")
    tool.ok(tmp_path / "before", *keys)
    path = tmp_path / "before/epoch_0_step_4"
    worse = ("Data.Eval.dataset.max_seq_len=2", f"Engine.save_load.ckpt_dir={path}")
    tool.ok(tmp_path / "after", *keys, *worse)
    [then] = [r["loss"] for r in records(tmp_path / "before", "eval") if r["step"] == 4]
    now = {r["loss"]: r["step"] for r in records(tmp_path / "after", "eval")}
    assert min(now) > then, "the test needs an evaluation with worse results"
    assert f"epoch_0_step_{now[min(now)]}" in (tmp_path / "after/best").read_text()


def test_another_optimizer_is_refused_or_starts_afresh(
    tool: Tool, resume: Callable[..., str], saved: Path, tmp_path: Path
) -> None:
    sgd = ("Optimizer.name=SGD", "Optimizer.lr.max_lr=1e-3")
    start = f"Engine.save_load.ckpt_dir={saved}/epoch_0_step_4"
    command = tool.command(TRAIN, tmp_path / "kept", *FEW, start, *sgd)
    refused = programs.run(command, timeout=120, env=environment())
    assert refused.returncode == 2, refused.stdout
    assert "Optimizer.name = 'AdamW', this configuration has 'SGD'" in refused.stderr
    assert "resuming" not in refused.stdout  # said of what was resumed, and not before
    said = resume(*sgd, "Engine.save_load.load_optim=False")
    assert "Optimizer.name = 'SGD' (was 'AdamW'), a fresh optimizer" in said


@pytest.mark.parametrize(
    "fresh",
    [
        ("Engine.save_load.reset_data=True", "Data.Train.dataset.split=[7,3,0]"),
        ("Engine.save_load.load_optim=False", "Optimizer.name=SGD", "Optimizer.lr.max_lr=1e-3"),
        ("Engine.save_load.reset_data=True", "Engine.save_load.load_optim=False"),
    ],
    ids=["data", "optimizer", "both"],
)
def test_the_same_command_continues_what_it_started_afresh(
    resume: Callable[..., str], tmp_path: Path, fresh: tuple[str, ...]
) -> None:
    """With ``resume=auto``, only the start from ``ckpt_dir`` drops state, not each restart after it."""
    command = (*fresh, "Engine.save_load.resume=auto", "Engine.save_load.save_steps=2")
    assert TOLD in resume(*command)
    whole = losses(tmp_path)
    [last] = tmp_path.glob("epoch_*_step_8")
    shutil.rmtree(last)  # as if the run had been killed after step 6
    said = resume(*command)
    assert "(global step 6)" in said and TOLD not in said
    assert losses(tmp_path) == whole
