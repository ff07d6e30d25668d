"""The check of conversions: what it finds, and what it asks transformers."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.compare_logits import our_logits
from ppfleetx.conversion.convert import Conversion, check_logits, convert, model_of
from ppfleetx.conversion.huggingface.directory import read_hf
from tests.conversion import hf_dirs


def change(directory, name, by):
    """Replace one tensor of a directory."""
    tensors = dict(load_file(directory / "model.safetensors"))
    tensors[name] = by(tensors[name])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name, norm", [("hf_gpt2", "transformer.ln_f.weight"), ("hf_llama", "model.norm.weight")]
)
def test_rounded_weights_pass_and_wrong_ones_do_not(tmp_path, name, norm, dtype):
    source = hf_dirs.write(tmp_path / "hf", name)
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours", dtype=dtype)
    written = convert(there)
    assert check_logits(there, written) < 1e-4
    both = Conversion("hf", "hf", source, tmp_path / "back", dtype=dtype)
    convert(both)
    assert check_logits(both, tmp_path / "back") < 1e-4
    change(source, norm, lambda weight: weight * np.float32(1 + 2**-7))
    with pytest.raises(CheckpointError, match=f"logits of {source} .* differ"):
        check_logits(there, written)


def test_what_was_written_for_hugging_face_is_checked_too(tmp_path):
    job = Conversion("hf", "hf", hf_dirs.write(tmp_path / "hf", "hf_llama"), tmp_path / "out")
    convert(job)
    change(tmp_path / "out", "model.norm.weight", lambda weight: weight * 2)
    with pytest.raises(CheckpointError, match=f"logits of {tmp_path / 'out'} .* differ"):
        check_logits(job, tmp_path / "out")


# Stands for an interpreter with transformers: it answers with the logits it was given.
INTERPRETER = """#!{python}
import shutil, sys
script, directory, probe, answer = sys.argv[1:]
assert script.endswith("transformers_logits.py") and directory == {directory!r}
shutil.copyfile({logits!r}, answer)
"""


def test_another_interpreter_is_asked(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    job = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    written = convert(job)
    if find_spec("torch") is None:
        with pytest.raises(CheckpointError, match=r"transformers failed in .*No module named 'torch'"):
            check_logits(job, written, python_with_transformers=sys.executable)
    with pytest.raises(CheckpointError, match="cannot be run"):
        check_logits(job, written, python_with_transformers=str(tmp_path / "none"))
    answer, interpreter = tmp_path / "logits.npy", tmp_path / "python"
    text = INTERPRETER.format(python=sys.executable, directory=str(source), logits=str(answer))
    interpreter.write_text(text)
    interpreter.chmod(0o755)
    weights = read_hf(source)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 24))
    right = our_logits(weights, model_of(weights, None), tokens)
    np.save(answer, right)
    assert check_logits(job, written, python_with_transformers=str(interpreter)) < 1e-4
    np.save(answer, right + 0.01)
    with pytest.raises(CheckpointError, match="here and in transformers differ"):
        check_logits(job, written, python_with_transformers=str(interpreter))
