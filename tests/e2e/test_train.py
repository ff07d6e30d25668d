"""Training through tools/train.py: output, stopping, resuming and rejected configurations."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Tool, losses, records

LOG_LINE = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - global step (\d+), epoch: \d+, batch: \d+, "
    r"loss: \d+\.\d{9}, avg_reader_cost: \d+\.\d{5} sec, avg_batch_cost: \d+\.\d{5} sec, "
    r"speed: \d+\.\d\d step/s, ips_total: \d+ tokens/s, ips: \d+ tokens/s, "
    r"learning rate: \d\.\d{5}e[-+]\d\d\b.*$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def uninterrupted(tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of a run of 8 steps that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    done = tool.ok(output_dir, executed=True)
    assert "type promotion" not in done.stderr, "Paddle's warning of operands that differ in type"
    (output_dir / "stdout").write_text(done.stdout)
    return output_dir


def test_a_run_writes_what_is_promised(uninterrupted: Path) -> None:
    said = (uninterrupted / "stdout").read_text()
    steps = [int(step) for step in LOG_LINE.findall(said)]
    assert steps == list(range(1, 9))
    predicted, measured = re.search(r"memory of tensors (\S+) and (\S+) MiB, step", said).groups()
    assert float(predicted) == pytest.approx(float(measured), rel=0.08)
    assert said.count("checksums of the data: the index of 1 corpus compared\n") == 1
    train = records(uninterrupted, "train")
    assert [record["step"] for record in train] == steps
    assert {"epoch", "loss", "lr", "grad_norm", "tokens", "reader_cost", "batch_cost"} <= train[0].keys()
    assert train[0]["lr"] > 0
    assert train[-1]["loss"] < train[0]["loss"]
    assert [record["step"] for record in records(uninterrupted, "eval")] == [0, 4, 8]
    assert {path.name for path in uninterrupted.glob("epoch_*")} == {"epoch_0_step_4", "epoch_0_step_8"}
    assert (uninterrupted / "epoch_0_step_8/mp_00_sharding_00_pp_00").is_dir()


def test_a_flipped_token_is_found_before_training(corpus: Path, tmp_path: Path) -> None:
    for suffix in ("bin", "idx", "checksums.json"):
        shutil.copy(f"{corpus}.{suffix}", tmp_path / f"toy.{suffix}")
    with (tmp_path / "toy.bin").open("r+b") as file:
        file.seek(4000)
        file.write(b"\1\0" if file.read(2) == b"\2\0" else b"\2\0")
    tool = Tool(tmp_path / "toy")
    tool.ok(tmp_path / "a", "Engine.max_steps=2")  # by default the index is compared
    said = tool.refused(tmp_path / "b", "Engine.max_steps=2", "Data.Train.dataset.verify=full")
    assert re.search(r"toy\.bin: block 0, bytes \[0, [\d,]+\), is not as it was written", said)
    assert not list((tmp_path / "b").glob("epoch_*"))


@pytest.mark.parametrize(
    ("number", "num_steps"), [(signal.SIGKILL, 1), (signal.SIGTERM, 3), (signal.SIGKILL, 6)]
)
def test_resume_repeats_the_uninterrupted_run_bit_for_bit(
    tool: Tool, tmp_path: Path, uninterrupted: Path, number: signal.Signals, num_steps: int
) -> None:
    """Dropout is on in this configuration."""
    tool.stop_after(tmp_path, num_steps, number, "Engine.save_load.save_steps=2")
    tool.ok(tmp_path, "Engine.save_load.save_steps=2", "Engine.save_load.resume=auto")
    assert losses(tmp_path) == losses(uninterrupted)


def test_init_from_takes_the_weights_alone(tool: Tool, tmp_path: Path, uninterrupted: Path) -> None:
    tool.ok(tmp_path, f"Engine.save_load.init_from={uninterrupted}", "Engine.max_steps=2")
    assert [step for step, *_ in losses(tmp_path)] == [1, 2]
    before = records(uninterrupted, "eval")[-1]["loss"]
    assert records(tmp_path, "eval")[0]["loss"] == before


def test_a_finished_run_is_left_alone(tool: Tool, uninterrupted: Path) -> None:
    before = losses(uninterrupted)
    done = tool.ok(uninterrupted, "Engine.save_load.resume=auto")
    assert "nothing to train: 8 of 8 steps" in done.stdout.splitlines()[-1]
    assert losses(uninterrupted) == before


def test_eval_tool_agrees_with_evaluation_while_training(tool: Tool, uninterrupted: Path) -> None:
    ckpt = f"Engine.save_load.ckpt_dir={uninterrupted}"
    done = tool.ok(uninterrupted, ckpt, script="tools/eval.py", executed=True)
    expected = records(uninterrupted, "eval")[-1]["loss"]
    assert f"eval at global step 8, loss: {expected:.9f}" in done.stdout


def test_a_loss_that_is_not_finite_stops_the_run_in_words(tool: Tool, tmp_path: Path) -> None:
    said = tool.refused(tmp_path, "Optimizer.lr.max_lr=1e30", "Optimizer.grad_clip=null")
    assert re.search(r"error: global step \d: (loss|gradient norm) is (nan|inf)", said)
    assert "positions in the training order: [" in said


def test_profiler_writes_a_trace_and_tables(tool: Tool, tmp_path: Path) -> None:
    profiled = ("Profiler.enable=True", "Profiler.scheduler=[1, 3]")
    done = tool.ok(tmp_path, *profiled, "Engine.max_steps=4", "Engine.eval_freq=0")
    assert list((tmp_path / "profiler_log").glob("*.json"))
    assert "Overview Summary" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["Engine.save_load.ckpt_dir=/nowhere/at/all"], "/nowhere/at/all"),
        (["Engine.save_load.resume=True"], "Engine.save_load.resume=auto begins a new run"),
        (["Data.Train.dataset.input_dir=/nowhere"], "/nowhere"),
        (["Data.Train.dataset.split=[0, 1, 0]"], "Train"),
        (["Distributed.mp_degree=2"], "mp 2"),
        (["Global.device=gpu"], "Global.device"),
        (["Model.vocab_size=300"], "300"),
    ],
)
def test_mistakes_end_in_one_message_and_code_2(
    tool: Tool, tmp_path: Path, overrides: list[str], expected: str
) -> None:
    said = tool.refused(tmp_path, *overrides)
    assert expected in said
