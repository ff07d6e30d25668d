"""The programs of ``projects/megatron``: what they print and refuse, without starting ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppfleetx.commands import megatron_programs as megatron
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.core.engine.callbacks.log_lines import MegatronLog, MindSpeedLog
from ppfleetx.core.engine.run_view import EvalRecord, StepRecord
from ppfleetx.dialects.megatron import gpt2_script
from ppfleetx.dialects.megatron.dialect import of_arguments

PROJECT = Path(__file__).resolve().parents[2] / "projects" / "megatron"


@pytest.mark.parametrize(
    ("size", "plan", "micro_batches", "parameters"),
    [
        ("345M", "dp 4, mp 1, pp 2", 1, 354_871_296),
        ("1.3B", "dp 2, mp 2, pp 2", 2, 1_313_984_512),
        ("2.7B", "dp 2, mp 2, pp 2", 2, 2_652_001_280),
        ("3.7B", "dp 2, mp 2, pp 2", 2, 3_786_381_312),
        ("345M_without_mp", "dp 8, mp 1, pp 1", 1, 354_871_296),
    ],
)
def test_each_size(size, plan, micro_batches, parameters, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [f"--model_size={size}", f"--data_path={tmp_path}"]
    assert megatron.run_gpt2([*asked, "--check"], evaluates=True) == 0
    report = capsys.readouterr().out
    for words in (f"plan           {plan}, sharding 1", f"({parameters:,})", "500000 steps", "3200 warm-up"):
        assert words in report
    assert f"note           {tmp_path}/gpt2-vocab.json does not exist: GPT-2's 50257 tokens" in report
    assert not list(tmp_path.iterdir())  # nothing is left of a look
    request = gpt2_script.request_of(asked)
    result = of_arguments(gpt2_script.arguments_of(request, evaluates=True), 8)
    cfg = load_tree(result.tree(), result.warnings, world_size=8)
    assert (cfg.batch.accumulate_steps, cfg.Engine.mix_precision.scale_loss) == (micro_batches, 4096.0)
    assert len(cfg.Model.recomputed_layers()) == cfg.Model.num_layers
    (tmp_path / "ours.yaml").write_text(result.yaml())
    assert load_config(tmp_path / "ours.yaml", world_size=8) == cfg


def test_further_arguments_replace_those_of_the_size():
    asked = ["--train_iters=20", "--hidden-size=64", "--global-batch-size=32"]
    request = gpt2_script.request_of(asked)
    words = gpt2_script.arguments_of(request, evaluates=False)
    assert [word for word in words if word.startswith("--hidden-size")] == ["--hidden-size=64"]
    cfg = load_tree(of_arguments(words, 8).tree(), world_size=8)
    assert (cfg.Model.hidden_size, cfg.Engine.max_steps, cfg.Data.Eval) == (64, 20, None)
    assert (cfg.Global.global_batch_size, cfg.batch.accumulate_steps) == (32, 2)


@pytest.mark.parametrize(
    "word, message",
    [
        ("--model_size=6.7B", "must be one of 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp"),
        ("--train_iters=many", "must be a number of at least 1"),
        ("--train_iters", "needs a value"),
        ("345M", "must be --name=value"),
    ],
)
def test_what_a_script_refuses(word, message):
    with pytest.raises(ConfigError, match=message):
        gpt2_script.request_of([word])


def test_the_table_of_results(tmp_path):
    records = [
        {"kind": "eval", "step": 0, "ppl": 1.0},
        {"kind": "train", "step": 1, "ips_total": 1024 * 10.0},
        {"kind": "eval", "step": 2, "ppl": 26.375},
        {"kind": "train", "step": 2, "ips_total": 1024 * 20.0},
        {"kind": "eval", "step": 3, "ppl": 27.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = gpt2_script.arguments_of(gpt2_script.request_of([]), evaluates=True)
    cfg = load_tree(of_arguments(words, 8).tree(), world_size=8)
    assert megatron.results_table("345M", cfg, tmp_path).splitlines()[-1] == (
        "| 8p-CPU | 345M | 26.375 | 15.000 | 1024 | 2 |"
    )


def test_an_earlier_run_is_put_aside(tmp_path):
    for number in range(2):
        output = tmp_path / "ckpts_tmp"
        output.mkdir()
        (output / "kept").write_text(str(number))
        megatron._put_aside(output)
    assert [(tmp_path / f"ckpts_tmp.{number}" / "kept").read_text() for number in (1, 2)] == ["0", "1"]
    assert not (tmp_path / "ckpts_tmp").exists()


def test_pretrain_gpt_checks_a_job_of_any_size(capsys):
    words = (
        "--check --world-size 16 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--micro-batch-size 2 --train-iters 3 --lr 1e-3 --data-path a --vocab-size 99 "
        "--use-distributed-optimizer --tensor-model-parallel-size 2"
    )
    words = words.split()
    megatron.run(words)
    assert "plan           dp 1, mp 2, pp 1, sharding 8 (stage 1)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="goes with --check"):
        megatron.run(words[1:])
    megatron.run(["--help"])
    assert "usage: pretrain_gpt.py" in capsys.readouterr().out


def test_the_scripts_hand_everything_on(tmp_path):
    """From any directory; a mistake ends with code 2 and one sentence."""
    script = PROJECT / "test" / "train_performance_8p.sh"
    command = ["bash", script, f"--data_path={tmp_path}", "--model_size=9B"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.startswith("error: --model_size = '9B': must be one of 345M")
    assert found.stderr.count("\n") == 1


def test_the_corpus_has_the_name_that_the_scripts_read(tmp_path, tokenizer_files):
    vocab, merges = tokenizer_files
    (tmp_path / "gpt2-vocab.json").write_text(vocab)
    with pytest.raises(DataError, match=r"gpt2-merges.txt is not there. Nothing is downloaded"):
        megatron.prepare_gpt2_corpus(["--output_dir", str(tmp_path)])
    (tmp_path / "gpt2-merges.txt").write_text(merges)
    with pytest.raises(DataError, match="there is no text"):
        megatron.prepare_gpt2_corpus(["--output_dir", str(tmp_path), "--extracted", str(tmp_path / "text")])
    for number in range(3):
        part = tmp_path / "text" / "AA" / f"wiki_{number:02}"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"text": f"article {number} " * 9}) + "\n")
    arguments = ["--output_dir", str(tmp_path), "--extracted", str(tmp_path / "text"), "--workers", "1"]
    megatron.prepare_gpt2_corpus(arguments)
    assert {path.name for path in tmp_path.glob("my-gpt*")} == {
        f"my-gpt_text_sentence{suffix}" for suffix in (".bin", ".idx", ".checksums.json")
    }
    assert len((tmp_path / "wiki_all.json").read_text().splitlines()) == 3
    with pytest.raises(DataError, match="nothing is overwritten"):
        megatron.prepare_gpt2_corpus(arguments)


@pytest.fixture
def tokenizer_files() -> tuple[str, str]:
    """A byte-level vocabulary without merges, in GPT-2's files."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = {char: number for number, char in enumerate([*sorted(ByteLevel.alphabet()), "<|endoftext|>"])}
    return json.dumps(words), "#version: 0.2\n"


def record(step: int, **keys) -> StepRecord:
    known = {"epoch": 0, "batch": step - 1, "loss": 6.25, "lr": 1e-4, "weight_decay": 0.0, "grad_norm": 1.5}
    tokens = {"num_valid_tokens": 64.0, "num_tokens": 64, "batch_size": 16, "data_size": 1}
    costs = {"reader_cost": 0.0, "batch_cost": 0.25}
    return StepRecord(step, **{**known, **tokens, **costs, **keys})


def test_megatrons_lines(monkeypatch):
    said = []
    monkeypatch.setattr(
        "ppfleetx.core.engine.callbacks.log_lines.get_logger", lambda: SimpleNamespace(info=said.append)
    )
    log = MegatronLog(2)
    state = SimpleNamespace(consumed_samples=32)
    run = SimpleNamespace(max_steps=3, state=state)
    for step in (1, 2, 3):
        log.on_step_end(run, record(step, loss_scale=4096.0 if step == 2 else None, skipped=step == 1))
    log.on_eval_end(run, EvalRecord(3, 2.0, 7.389, 64.0, 1.0))
    time = "elapsed time per iteration (ms): 250.0 | samples/sec: 64.000"
    numbers = "learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 6.250000E+00 |"
    assert said == [
        f" iteration        2/       3 | consumed samples:           32 | {time} | {numbers} "
        "loss scale: 4096.0 | grad norm: 1.500 | number of skipped iterations:   1 | "
        "number of nan iterations:   0 |",
        f" iteration        3/       3 | consumed samples:           32 | {time} | {numbers} "
        "grad norm: 1.500 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        " validation loss at iteration 3 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | ",
    ]


def test_mindspeeds_line(capsys):
    log = MindSpeedLog(1)
    log.on_step_end(SimpleNamespace(max_steps=20), record(13, loss=12.0177145004272461))
    assert capsys.readouterr().out.startswith(
        "INFO - Epoch: 0, Step: 13, Loss: 12.0177145004272461, Time: 250.00 ms"
    )
