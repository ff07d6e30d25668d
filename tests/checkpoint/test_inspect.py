"""Looking at checkpoints: table, damage, differences; and the tools' exit codes."""

import json
import re
from functools import partial

import numpy as np
import pytest

from ppfleetx.checkpoint.inspect import (
    differences,
    summary,
    table,
    tensors_of,
)
from ppfleetx.checkpoint.resolve_checkpoint import open_named
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.commands.main import call
from ppfleetx.config.errors import UserError
from tests.checkpoint.checkpoints import save, slices
from tests.conversion import hf_dirs


@pytest.fixture
def run(capsys):
    """``run(verb, *arguments)``: the exit code, and what was printed."""

    def call_verb(verb, *arguments):
        return call(verb, list(map(str, arguments))) or 0, capsys.readouterr().out

    return call_verb


@pytest.fixture
def inspect(run):
    return partial(run, "inspect")


def test_summary_and_table(tmp_path, inspect):
    save(tmp_path, 7, state={"train": {"consumed_samples": 56}, "schedule": {"max_lr": 1e-3}}, plan={"mp": 2})
    checkpoint = open_named(tmp_path)
    facts = summary(checkpoint)
    assert (facts["step"], facts["consumed_samples"], facts["plan"]) == (7, 56, {"mp": 2})
    assert facts["parameters"] == 12 * 4 + 16 + 4
    assert facts["model_bytes"] == 4 * facts["parameters"]
    assert facts["optimizer_bytes"] == facts["model_bytes"] + 3 * 4
    lines = table(tensors_of(checkpoint, re.compile("fc1.*moment"))).splitlines()
    assert len(lines) == 2 and lines[1].split() == [
        "decoder.layers.0.mlp.fc1.bias/moment1", "16", "F32", "64", "B", "1", "1"
    ]  # fmt: skip
    code, shown = inspect(tmp_path)
    assert code == 0
    for text in ("step               7", "max_lr 0.001", "12x4", "mp 2"):
        assert text in shown
    assert json.loads(inspect(tmp_path, "--json")[1])["step"] == 7


def test_verify_tells_sound_from_damaged(tmp_path, inspect):
    """``test_faults.py`` damages every file at random places."""
    step_dir = save(tmp_path, 1)
    code, said = inspect(step_dir, "--verify")
    assert code == 0 and "sound" in said
    file = next(step_dir.rglob("model.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    code, said = inspect(step_dir, "--verify")
    assert code == 1 and "damaged" in said


def test_diff_lists_what_differs(tmp_path, inspect):
    one, two, other = save(tmp_path / "a", 1), save(tmp_path / "b", 1), tmp_path / "c"
    assert inspect("--diff", one, two)[0] == 0
    changed = list(slices(1))
    changed[0].array()[0, 0] += 0.5
    changed.pop()
    other = save(other, 1, tensors=changed)
    code, said = inspect("--diff", one, other)
    assert code == 1
    assert "model embedding.word_embeddings.weight: largest difference 0.5\n" in said
    assert re.search(r"optimizer decoder\.final_norm\.weight/beta1_pow: only in .*/a/", said)
    assert "2 tensors differ" in said
    assert inspect("--diff", one, other, "--filter", "fc1")[0] == 0


def test_vocabulary_padding_is_no_difference(tmp_path):
    name = "embedding.word_embeddings.weight"
    values = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)

    def saved(where, rows):
        padded = np.zeros((rows, 4), np.float32)
        padded[:10] = values[:10]
        piece = TensorSlice(name, "model", "F32", padded.shape, (0, 0), padded.shape, padded, vocab_dim=0)
        return open_named(save(where, tensors=[piece], vocab_size=10))

    assert list(differences(saved(tmp_path / "a", 12), saved(tmp_path / "b", 16))) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere", "--verify"], "there is no directory"),
        (["--diff", "/nowhere", "/nowhere"], "there is no directory"),
        ([], "give one checkpoint"),
        (["/nowhere", "--filter", "("], "regular expression"),
    ],
)
def test_mistakes_are_named(inspect, arguments, message):
    with pytest.raises(UserError, match=message):
        inspect(*arguments)


def test_conversions_from_the_command_line(tmp_path, run, inspect):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    code, said = run("convert", "--from", "hf", "--to", "ppfleetx", "--input", source,
                     "--output", tmp_path / "ours", "--check-logits")  # fmt: skip
    assert code == 0 and "logits of source and result differ by at most" in said
    ours = ("convert", "--from", "ppfleetx", "--to", "ppfleetx", "--input", tmp_path / "ours")
    assert run(*ours, "--output", tmp_path / "cut", "--plan", "mp=2")[0] == 0
    assert inspect("--diff", tmp_path / "ours", tmp_path / "cut")[0] == 0
    for bad in (["--plan", "dp=2"], ["--merge", "--plan", "mp=2"], ["-o", "Model.num_layers=3"]):
        with pytest.raises(UserError):
            run(*ours, "--output", tmp_path / "bad", *bad)
