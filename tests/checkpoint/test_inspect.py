"""Looking at checkpoints: table, damage, differences; and the tools' exit codes."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.inspect import (
    differences,
    open_for_inspection,
    summary,
    table,
    tensors_of,
)
from tests.checkpoint.checkpoints import save, slices
from tests.conversion import hf_dirs
from tests.helpers import programs

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool, *arguments):
    done = programs.run([sys.executable, TOOLS / tool, *map(str, arguments)], timeout=60)
    assert "Traceback" not in done.stderr
    return done


def inspect(*arguments):
    return run("inspect_checkpoint.py", *arguments)


def test_summary_and_table(tmp_path):
    save(tmp_path, 7, state={"train": {"consumed_samples": 56}, "schedule": {"max_lr": 1e-3}}, plan={"mp": 2})
    checkpoint = open_for_inspection(tmp_path)
    facts = summary(checkpoint)
    assert (facts["step"], facts["consumed_samples"], facts["plan"]) == (7, 56, {"mp": 2})
    assert facts["parameters"] == 12 * 4 + 16 + 4
    assert facts["model_bytes"] == 4 * facts["parameters"]
    assert facts["optimizer_bytes"] == facts["model_bytes"] + 3 * 4
    lines = table(tensors_of(checkpoint, re.compile("fc1.*moment"))).splitlines()
    assert len(lines) == 2 and lines[1].split() == [
        "decoder.layers.0.mlp.fc1.bias/moment1", "16", "F32", "64", "B", "1", "1"
    ]  # fmt: skip
    shown = inspect(tmp_path)
    assert shown.returncode == 0
    for text in ("step               7", "max_lr 0.001", "12x4", "mp 2"):
        assert text in shown.stdout
    assert json.loads(inspect(tmp_path, "--json").stdout)["step"] == 7


def test_verify_tells_sound_from_damaged(tmp_path):
    """``test_faults.py`` damages every file at random places."""
    step_dir = save(tmp_path, 1)
    sound = inspect(step_dir, "--verify")
    assert sound.returncode == 0 and "sound" in sound.stdout
    file = next(step_dir.rglob("model.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    done = inspect(step_dir, "--verify")
    assert done.returncode == 1 and "damaged" in done.stdout


def test_diff_lists_what_differs(tmp_path):
    one, two, other = save(tmp_path / "a", 1), save(tmp_path / "b", 1), tmp_path / "c"
    assert inspect("--diff", one, two).returncode == 0
    changed = list(slices(1))
    changed[0].array()[0, 0] += 0.5
    changed.pop()
    other = save(other, 1, tensors=changed)
    done = inspect("--diff", one, other)
    assert done.returncode == 1
    assert "model embedding.word_embeddings.weight: largest difference 0.5\n" in done.stdout
    assert re.search(r"optimizer decoder\.final_norm\.weight/beta1_pow: only in .*/a/", done.stdout)
    assert "2 tensors differ" in done.stdout
    assert inspect("--diff", one, other, "--filter", "fc1").returncode == 0


def test_vocabulary_padding_is_no_difference(tmp_path):
    name = "embedding.word_embeddings.weight"
    values = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)

    def saved(where, rows):
        padded = np.zeros((rows, 4), np.float32)
        padded[:10] = values[:10]
        from ppfleetx.checkpoint.slices import TensorSlice

        piece = TensorSlice(name, "model", "F32", padded.shape, (0, 0), padded.shape, padded, vocab_dim=0)
        return open_for_inspection(save(where, tensors=[piece], vocab_size=10))

    assert list(differences(saved(tmp_path / "a", 12), saved(tmp_path / "b", 16))) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/nowhere"], "there is no directory"),
        (["/nowhere", "--verify"], "there is no directory"),
        (["--diff", "/nowhere", "/nowhere"], "there is no directory"),
        ([], "give one checkpoint"),
        (["/nowhere", "--filter", "("], "regular expression"),
    ],
)
def test_mistakes_end_with_code_2(arguments, message):
    done = inspect(*arguments)
    assert done.returncode == 2 and message in done.stderr


def test_convert_tool_from_the_command_line(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    done = run("convert_checkpoint.py", "--from", "hf", "--to", "ppfleetx", "--input", source,
               "--output", tmp_path / "ours", "--check-logits")  # fmt: skip
    assert done.returncode == 0 and "logits of source and result differ by at most" in done.stdout
    ours = ("convert_checkpoint.py", "--from", "ppfleetx", "--to", "ppfleetx", "--input", tmp_path / "ours")
    done = run(*ours, "--output", tmp_path / "cut", "--plan", "mp=2")
    assert done.returncode == 0
    assert inspect("--diff", tmp_path / "ours", tmp_path / "cut").returncode == 0
    for bad in (["--plan", "dp=2"], ["--merge", "--plan", "mp=2"], ["-o", "Model.num_layers=3"]):
        done = run(*ours, "--output", tmp_path / "bad", *bad)
        assert done.returncode == 2 and done.stderr.startswith("error: ")
