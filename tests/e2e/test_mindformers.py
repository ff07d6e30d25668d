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
from tests.e2e.conftest import ROOT, TRAIN, losses
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
    words = "--input . --output_dir data --tokenizer words --seq_length 16"
    done = ok(directory, PROJECT / "prepare_wikitext2.py", *words.split())
    assert "train: 6 passages" in done.stdout
    return directory


def same_weights(one: Path, other: Path) -> bool:
    a, b = (open_checkpoint(resolve_checkpoint(str(path))) for path in (one, other))
    return a.names() == b.names() and all((a.read(name) == b.read(name)).all() for name in a.names())


def ok(cwd: Path, script: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return programs.ok([sys.executable, script, *words], cwd=cwd)


def refused(cwd: Path, script: Path, *words: str | Path) -> str:
    return programs.refused([sys.executable, script, *words], cwd=cwd)


def mindformers(words: str, *more: str) -> list[str | Path]:
    """The program with these words, and options beside those of a small model."""
    return [PROJECT / "run_mindformer.py", "--config", CONFIG, *words.split(), "--options", *SMALL, *more]


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """Output directory of the command of the model card."""
    words = "--run_mode train --device_target Ascend --dataset_dir data/train --epochs 1"
    done = ok(work, *mindformers(words, "output_dir=trained"))
    assert "keys of MindFormers that have no meaning here" in done.stdout + done.stderr
    return work / "trained"


def test_trained_natively_losses_and_weights_are_the_same_bits(work: Path, trained: Path) -> None:
    given = ["run_mindformer.py", "--config", CONFIG, "--dataset_dir", "data/train", "--epochs", "1"]
    translate = ROOT / "tools/translate.py"
    ok(work, translate, "--to", "ours.yaml", "--", *given, "--options", *SMALL)
    ok(work, ROOT / TRAIN, "-c", "ours.yaml", "--check")
    ok(work, ROOT / TRAIN, "-c", "ours.yaml", "-o", "Engine.save_load.output_dir=native")
    assert losses(trained) == losses(work / "native") != []
    assert same_weights(work / "native", trained)


def test_finetune_begins_a_run_with_the_weights(work: Path, trained: Path) -> None:
    words = "--run_mode finetune --load_checkpoint trained --dataset_dir=data/train --epochs=1"
    ok(work, *mindformers(words, "output_dir=tuned"))
    assert len(losses(work / "tuned")) == len(losses(trained))
    assert losses(work / "tuned")[0] < losses(trained)[0]


def test_eval_of_a_corpus_and_of_a_text(work: Path, trained: Path) -> None:
    given = "--run_mode=eval --load_checkpoint=trained --dataset_dir"
    for corpus, said in (("data/valid", "ppl"), ("wiki.valid.tokens", "adjusted ppl")):
        assert said in ok(work, *mindformers(f"{given} {corpus}", "output_dir=evaluated")).stdout


def test_predict_counts_the_prompt(work: Path, trained: Path) -> None:
    script, *given = mindformers("--run_mode predict --load_checkpoint trained")
    (work / "prompts.txt").write_text("In 2000\nThe word\n")
    done = ok(work, script, "--predict_data", "The last passage", *given)
    assert "Generation: The last passage" in done.stdout
    assert ok(work, script, "--predict_data", "prompts.txt", *given).stdout.count("Prompt:") == 2
    said = refused(work, script, "--predict_data", TEXT, *given)
    assert "prompt and continuation together" in said


def test_what_is_missing_is_said_before_paddle(work: Path, tmp_path: Path) -> None:
    (tmp_path / "wiki.mindrecord").write_bytes(b"\0")
    (tmp_path / "gpt2.ckpt").write_bytes(b"\0")
    for words, said in (
        ("", "train_dataset.data_loader.dataset_dir: names no corpus; give --dataset_dir DIR"),
        (f"--dataset_dir {tmp_path}", "wiki.mindrecord is a file of MindSpore, which is not read here"),
        ("--run_mode predict", "--load_checkpoint: needs a trained model"),
        (f"--run_mode=eval --load_checkpoint={tmp_path}/gpt2.ckpt", "is a file of MindSpore"),
        ("--run_mode=predict --load_checkpoint=trained", "--predict_data: predicting needs a prompt"),
    ):
        assert said in refused(work, *mindformers(words))


def test_weights_of_hugging_face_are_converted_and_used(tmp_path: Path) -> None:
    source = hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    config, _ = hf_dirs.golden("hf_gpt2")
    layers, heads = str(config["n_layer"]), str(config["n_head"])
    script = PROJECT / "mindformers/models/gpt2/convert_weight.py"
    given = ["--layers", layers, "--torch_path", source / "model.safetensors", "--mindspore_path"]
    ok(tmp_path, script, *given, "whole.ckpt")
    (source / "config.json").unlink()
    ok(tmp_path, script, *given, "alone.ckpt", "--num_heads", heads)
    assert same_weights(tmp_path / "whole.ckpt", tmp_path / "alone.ckpt")
    for words, said in (
        (given, "give the number of attention heads, --num_heads"),
        (["--num_heads=5", *given], "--num_heads = 5: "),
        (["--num_heads=4", "--layers", "99", *given[2:]], f"--layers = 99: model.safetensors has {layers}"),
    ):
        told = refused(tmp_path, script, *words, "wrong.ckpt")
        assert said in told and "ppfleetx-" not in told
