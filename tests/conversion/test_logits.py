"""The check of converted models: it reads what it checks by itself, and its bound holds for every type."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface import families
from ppfleetx.conversion.huggingface.rope import rope_keys
from ppfleetx.conversion.reference import hf_logits
from ppfleetx.conversion.reference_rope import llama_frequencies
from tests.conversion import hf_dirs
from tests.models.gpt_builders import GOLDENS, load_golden

FAMILIES = ["hf_gpt2", "hf_llama"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_cases():
    with np.load(GOLDENS / "hf_rope.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    base, _ = load_golden("hf_llama")
    changes = json.loads(str(arrays["cases"]))
    merged = {name: base | change for name, change in changes.items()}
    return {n: {k: v for k, v in c.items() if v != "absent"} for n, c in merged.items()}, arrays


def test_its_frequencies_are_those_of_transformers():
    cases, arrays = rope_cases()
    assert len(cases) > 30
    for name, config in cases.items():
        frequencies, factor = llama_frequencies(config, config["head_dim"])
        np.testing.assert_allclose(frequencies, arrays[f"frequencies/{name}"], rtol=2e-6, err_msg=name)
        assert factor == pytest.approx(float(arrays[f"factor/{name}"]), rel=1e-6), name


@pytest.mark.parametrize("name", ["short linear", "short llama3", "short yarn", "short both"])
def test_its_logits_are_those_of_transformers(name):
    cases, arrays = rope_cases()
    _, tensors = hf_dirs.golden("hf_llama")
    lazy = {key: LazyTensor("F32", value.shape, lambda value=value: value) for key, value in tensors.items()}
    found = hf_logits(cases[name], lazy, arrays["tokens"])[:, ::5]
    np.testing.assert_allclose(found, arrays[f"logits/{name}"], rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    "settings",
    [
        # Both places, of which transformers takes the first; slow frequencies that no short sequence shows.
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["both", "one"],
)  # fmt: skip
def test_a_scaling_that_is_not_read_is_found(tmp_path, monkeypatch, settings):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama", max_position_embeddings=131072, **settings)
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    assert check_logits(there, convert(there)) < 1e-4
    assert "rope_scaling:" in (tmp_path / "ours" / "config.yaml").read_text()
    monkeypatch.setattr(families, "rope_keys", lambda config: rope_keys(config) | {"rope_scaling": None})
    blind = Conversion("hf", "ppfleetx", source, tmp_path / "blind")
    with pytest.raises(CheckpointError, match=r"logits of .* and of our network differ"):
        check_logits(blind, convert(blind))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_are_rounded_pass_and_wrong_ones_do_not(tmp_path, monkeypatch, name, dtype):
    source = hf_dirs.write(tmp_path / "hf", name)
    there = Conversion("hf", "ppfleetx", source, tmp_path / "ours", dtype=dtype)
    written = convert(there)
    assert check_logits(there, written) < 1e-4
    both = Conversion("hf", "hf", source, tmp_path / "back", dtype=dtype)
    convert(both)
    assert check_logits(both, tmp_path / "back") < 1e-4
    # Rounding that is not to the nearest, and a norm that is scaled by 1 + 2^-7.
    truncated = Conversion("hf", "ppfleetx", source, tmp_path / "truncated", dtype=dtype)
    with monkeypatch.context() as patch:
        patch.setattr("ppfleetx.checkpoint.lazy.cast", _truncating)
        wrong = convert(truncated)
    with pytest.raises(CheckpointError, match="logits"):
        check_logits(truncated, wrong)
    norm = "transformer.ln_f.weight" if name == "hf_gpt2" else "model.norm.weight"
    tensors = dict(load_file(source / "model.safetensors"))
    tensors[norm] = tensors[norm] * np.float32(1 + 2**-7)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="logits"):
        check_logits(there, written)


def _truncating(values, stored, wanted):
    assert (stored, wanted) in {("F32", "F16"), ("F32", "BF16")}
    kept = 13 if wanted == "F16" else 16
    bits = values.astype(np.float32).view(np.uint32) >> kept << kept
    return (bits >> 16).astype(np.uint16) if wanted == "BF16" else bits.view(np.float32).astype(np.float16)


def test_what_was_written_for_hugging_face_is_checked_too(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    job = Conversion("hf", "hf", source, tmp_path / "out")
    convert(job)
    tensors = dict(load_file(tmp_path / "out" / "model.safetensors"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"logits of {tmp_path / 'out'} and of our network differ"):
        check_logits(job, tmp_path / "out")


def test_weights_beyond_float16_are_named(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    tensors = dict(load_file(source / "model.safetensors"))
    tensors["transformer.ln_f.bias"] = tensors["transformer.ln_f.bias"] + 1e6
    save_file(tensors, source / "model.safetensors")
    job = Conversion("hf", "ppfleetx", source, tmp_path / "out", dtype="float16")
    with pytest.raises(CheckpointError, match=r"final_norm\.bias .*65504"):
        convert(job)


# Stands for an interpreter with transformers: it answers with the logits it was given, or says why not.
INTERPRETER = """#!{python}
import shutil, sys
script, directory, probe, answer = sys.argv[1:]
assert script.endswith("ask_transformers.py") and directory == {directory!r}
shutil.copyfile({logits!r}, answer)
"""


def test_another_interpreter_is_asked(tmp_path):
    source = hf_dirs.write(tmp_path / "hf", "hf_llama")
    job = Conversion("hf", "ppfleetx", source, tmp_path / "ours")
    written = convert(job)
    if find_spec("torch") is None:
        with pytest.raises(CheckpointError, match=r"could not be asked with .*No module named 'torch'"):
            check_logits(job, written, python_with_transformers=sys.executable)
    with pytest.raises(CheckpointError, match="cannot be run"):
        check_logits(job, written, python_with_transformers=str(tmp_path / "none"))
    config, tensors = hf_dirs.golden("hf_llama")
    lazy = {key: LazyTensor("F32", value.shape, lambda value=value: value) for key, value in tensors.items()}
    tokens = np.random.default_rng(0).integers(0, 97, (2, 24))
    answer, interpreter = tmp_path / "logits.npy", tmp_path / "python"
    text = INTERPRETER.format(python=sys.executable, directory=str(source), logits=str(answer))
    interpreter.write_text(text)
    interpreter.chmod(0o755)
    right = hf_logits(config, lazy, tokens)
    np.save(answer, right)
    assert check_logits(job, written, python_with_transformers=str(interpreter)) < 1e-4
    np.save(answer, right + 0.01)
    with pytest.raises(CheckpointError, match="in NumPy and in transformers differ"):
        check_logits(job, written, python_with_transformers=str(interpreter))
