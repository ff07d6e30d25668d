"""run_mindformer.py as its users call it: train, finetune, eval, predict; and the same run natively."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
from tests.conversion import hf_dirs
from tests.data.prepare.test_wikitext import TEXT
from tests.e2e.conftest import ROOT, environment, losses
from tests.helpers import programs

PROJECT = ROOT / "projects/mindformers"
CONFIG = PROJECT / "configs/gpt2/run_gpt2.yaml"
_MODEL = {
    "embedding_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "seq_length": 16,
    "vocab_size": 300,
    "max_decode_length": 14,
    "hidden_act": "fast_gelu",
    "eos_token": "null",
}
SMALL = [
    *(f"model.model_config.{name}={value}" for name, value in _MODEL.items()),
    "runner_config.batch_size=2",
    "lr_schedule.learning_rate=0.01",
    "callbacks.1.save_checkpoint_steps=4",
    "processor.tokenizer.vocab_file=words/vocab.json",
    "processor.tokenizer.merges_file=words/merges.txt",
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with WikiText in small, its corpora and a tokenizer."""
    directory = tmp_path_factory.mktemp("mindformers")
    train_tokenizer([TEXT * 3], vocab_size=300).save(directory / "words")
    for split in ("train", "valid"):
        (directory / f"wiki.{split}.tokens").write_text(TEXT * 2, "utf-8")
    done = run(directory, PROJECT / "prepare_wikitext2.py", "--input", ".", "--output_dir", "data",
               "--tokenizer", "words", "--seq_length", "16")  # fmt: skip
    assert done.returncode == 0 and "train: 6 passages" in done.stdout, done.stderr
    return directory


def run(cwd: Path, script: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, words)]
    return programs.run(command, cwd=cwd, timeout=120, env=environment())


def same_weights(one: Path, other: Path) -> bool:
    a, b = (open_checkpoint(resolve_checkpoint(str(path))) for path in (one, other))
    return a.names() == b.names() and all((a.read(name) == b.read(name)).all() for name in a.names())


def mindformers(cwd: Path, *words: str, options: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    given = ["--config", str(CONFIG), *words, "--options", *SMALL, *(options or [])]
    return run(cwd, PROJECT / "run_mindformer.py", *given)


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """Output directory of the command of the model card."""
    words = "--run_mode train --device_target Ascend --dataset_dir data/train --epochs 1"
    done = mindformers(work, *words.split(), options=["output_dir=trained"])
    assert done.returncode == 0, done.stderr
    assert "keys of MindFormers that have no meaning here" in done.stdout + done.stderr
    return work / "trained"


def test_trained_natively_losses_and_weights_are_the_same_bits(work: Path, trained: Path) -> None:
    given = ["run_mindformer.py", "--config", CONFIG, "--dataset_dir", "data/train", "--epochs", "1"]
    translate = ROOT / "tools/translate.py"
    done = run(work, translate, "--to", "ours.yaml", "--", *given, "--options", *SMALL)
    assert done.returncode == 0, done.stderr
    done = run(work, ROOT / "tools/train.py", "-c", "ours.yaml", "--check")
    assert done.returncode == 0, done.stderr
    done = run(work, ROOT / "tools/train.py", "-c", "ours.yaml", "-o", "Engine.save_load.output_dir=native")
    assert done.returncode == 0, done.stderr
    assert losses(trained) == losses(work / "native") != []
    assert same_weights(work / "native", trained)


def test_finetune_begins_a_run_with_the_weights(work: Path, trained: Path) -> None:
    words = "--run_mode finetune --load_checkpoint trained --dataset_dir=data/train --epochs=1"
    done = mindformers(work, *words.split(), options=["output_dir=tuned"])
    assert done.returncode == 0, done.stderr
    assert len(losses(work / "tuned")) == len(losses(trained))
    assert losses(work / "tuned")[0] < losses(trained)[0]


def test_eval_of_a_corpus_and_of_a_text(work: Path, trained: Path) -> None:
    options = ["output_dir=evaluated"]
    given = ("--run_mode=eval", "--load_checkpoint=trained")
    done = mindformers(work, *given, "--dataset_dir", "data/valid", options=options)
    assert done.returncode == 0 and "ppl" in done.stdout, done.stderr
    done = mindformers(work, *given, "--dataset_dir", "wiki.valid.tokens", options=options)
    assert done.returncode == 0 and "adjusted ppl" in done.stdout, done.stderr


def test_predict_counts_the_prompt(work: Path, trained: Path) -> None:
    given = ("--run_mode", "predict", "--load_checkpoint", "trained")
    done = mindformers(work, *given, "--predict_data", "The last passage")
    assert done.returncode == 0 and "Generation: The last passage" in done.stdout, done.stderr
    (work / "prompts.txt").write_text("In 2000\nThe word\n")
    done = mindformers(work, *given, "--predict_data", "prompts.txt")
    assert done.returncode == 0 and done.stdout.count("Prompt:") == 2, done.stderr
    done = mindformers(work, *given, "--predict_data", TEXT)
    assert done.returncode == 2 and "prompt and continuation together" in done.stderr


def test_what_is_missing_is_said_before_paddle(work: Path, tmp_path: Path) -> None:
    (tmp_path / "wiki.mindrecord").write_bytes(b"\0")
    (tmp_path / "gpt2.ckpt").write_bytes(b"\0")
    for words, said in (
        ((), "train_dataset.data_loader.dataset_dir: names no corpus; give --dataset_dir DIR"),
        (("--dataset_dir", str(tmp_path)), "wiki.mindrecord is a file of MindSpore, which is not read here"),
        (("--run_mode", "predict"), "--load_checkpoint: needs a trained model"),
        (("--run_mode=eval", f"--load_checkpoint={tmp_path}/gpt2.ckpt"), "is a file of MindSpore"),
        (("--run_mode=predict", "--load_checkpoint=trained"), "--predict_data: predicting needs a prompt"),
    ):
        done = mindformers(work, *words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, (
            words,
            done.stderr,
        )


def test_weights_of_hugging_face_are_converted_and_used(tmp_path: Path) -> None:
    source = hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    config, _ = hf_dirs.golden("hf_gpt2")
    layers, heads = str(config["n_layer"]), str(config["n_head"])
    script = PROJECT / "mindformers/models/gpt2/convert_weight.py"
    given = ["--layers", layers, "--torch_path", source / "model.safetensors", "--mindspore_path"]
    whole = run(tmp_path, script, *given, "whole.ckpt")
    assert whole.returncode == 0, whole.stderr
    (source / "config.json").unlink()
    alone = run(tmp_path, script, *given, "alone.ckpt", "--num_heads", heads)
    assert alone.returncode == 0, alone.stderr
    assert same_weights(tmp_path / "whole.ckpt", tmp_path / "alone.ckpt")
    for more, said in (
        ([], "give the number of attention heads, --num_heads"),
        (["--num_heads=5"], "--num_heads = 5: "),
    ):
        wrong = run(tmp_path, script, *given, "wrong.ckpt", *more)
        assert wrong.returncode == 2 and said in wrong.stderr and "ppfleetx-" not in wrong.stderr
    wrong = run(tmp_path, script, "--layers", "99", *given[2:], "wrong.ckpt", "--num_heads=4")
    assert wrong.returncode == 2 and f"--layers = 99: model.safetensors has {layers} layers" in wrong.stderr
