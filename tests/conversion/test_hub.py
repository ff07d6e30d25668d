"""``hf:NAME``: a model of the Hugging Face hub, from a server of this test that speaks its protocol."""

from __future__ import annotations

import builtins
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.commands.main import call
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.compare_logits import our_logits
from ppfleetx.conversion.hub import HubName, hub_name, local_directory
from ppfleetx.utils.installed import NotInstalledError
from tests.conversion import hf_dirs
from tests.helpers.hub_server import Hub, hub_server
from tests.models.gpt_builders import load_golden

pytest.importorskip("huggingface_hub")
LLAMA, SHARDED, PICKLED, GATED = "org/llama", "org/gpt2", "org/old", "org/gated"
GGUF, EMPTY = "org/ggufs", "org/empty"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    llama = hf_dirs.write(root / "llama", "hf_llama")
    hf_dirs.write_tokenizer(llama)
    (llama / "README.md").write_text("# A model")
    (llama / "onnx").mkdir()
    (llama / "onnx" / "model.onnx").write_bytes(b"onnx")
    (llama / "pytorch_model.bin").write_bytes(b"a pickle that nobody has to read")
    sharded = hf_dirs.write(root / "gpt2", "hf_gpt2", shards=3)
    old = hf_dirs.write(root / "old", "hf_llama")
    (old / "model.safetensors").rename(old / "weights.gguf")
    other = hf_dirs.write(root / "other", "hf_llama", model_type="mamba")
    for name in ("ggufs", "empty"):
        (root / name).mkdir()
        (root / name / "README.md").write_text("# A model")
    for name in ("a.gguf", "b.gguf"):
        (root / "ggufs" / name).write_bytes(b"GGUF")
    ours = {LLAMA: llama, SHARDED: sharded, PICKLED: old, GATED: llama, "org/mamba": other}
    return {**ours, GGUF: root / "ggufs", EMPTY: root / "empty"}


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server(models) as hub:
        hub.gated = {GATED}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        yield hub


def test_names():
    assert hub_name("hf:Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B", "main")
    assert hub_name("hf:gpt2@refs/pr/1") == HubName("gpt2", "refs/pr/1")
    assert str(hub_name("hf:a/b@v1.0")) == "hf:a/b@v1.0"
    assert hub_name("directory/hf:x") is None
    for wrong in ("hf:", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a b/c", "hf:/etc/passwd"):
        with pytest.raises(CheckpointError, match="names no model"):
            hub_name(wrong)


def test_a_path_asks_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "socket", None)
    assert local_directory(tmp_path) == tmp_path


def test_only_what_is_needed_is_downloaded_and_once(hub, models):
    directory = local_directory(f"hf:{LLAMA}")
    needed = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    names = {path.name for path in directory.iterdir()}
    assert needed <= names <= needed | {"vocab.json", "merges.txt", "special_tokens_map.json"}
    for name in names:
        assert (directory / name).read_bytes() == (models[LLAMA] / name).read_bytes()
    assert sorted(hub.sent()) == sorted(names)
    hub.asked.clear()
    assert local_directory(f"hf:{LLAMA}@v1") == directory
    assert not hub.sent()


def test_a_model_of_the_hub_computes_what_transformers_does(hub):
    with ExitStack() as stack:
        place = resolve_model(f"hf:{SHARDED}", stack)
        weights = read_ppfleetx(place.checkpoint)
        _, arrays = load_golden("hf_gpt2")
        logits = our_logits(weights, ModelConfig(**weights.model), arrays["tokens"])
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=1e-4)
    assert sum(name.startswith("model-") for name in hub.sent()) == 3


def stranger(
    hub: Hub, tmp_path: Path, name: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Convert ``hf:NAME`` in a fresh process: in one that has imported something, more of the library is
    there. Returns what it did, and the names of the files that the hub sent to it."""
    hub.asked.clear()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    program = [sys.executable, "-m", "ppfleetx", "convert", "--from", "hf", "--to", "ppfleetx"]
    program += ["--input", f"hf:{name}", "--output", str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, env=os.environ | environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done, hub.sent()


def test_a_fresh_process_says_why_not(hub, tmp_path):
    done, sent = stranger(hub, tmp_path, GATED)
    assert (done.returncode, sent) == (2, [])
    assert "error: hf:org/gated: config.json is gated" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_fresh_process_downloads_what_is_needed_and_later_ones_find_it(hub, tmp_path):
    """Also by another revision, and without a hub."""
    done, sent = stranger(hub, tmp_path, LLAMA)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in sent
    assert not {"README.md", "model.onnx", "pytorch_model.bin"} & {*sent}
    assert len(sent) == len({*sent})
    done, sent = stranger(hub, tmp_path, f"{LLAMA}@v1")
    assert (done.returncode, sent) == (0, []), done.stderr
    assert hub.asked, "it asks which commit the revision is"
    assert "%|" not in done.stderr
    done, _ = stranger(hub, tmp_path, LLAMA, HF_HUB_OFFLINE="1")
    assert (done.returncode, hub.asked) == (0, []), done.stderr


def test_a_broken_download_goes_on_in_the_same_process_and_in_the_next(hub, tmp_path):
    """A broken connection is tried again at once; the next process has the files that came whole."""
    first, second, third = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    hub.cut_once, hub.status_of = {first}, {second: 500}
    done, sent = stranger(hub, tmp_path, SHARDED)
    assert done.returncode == 2 and f"HTTP 500 when asked for hf:{SHARDED}: {second}" in done.stderr
    assert sent.count(first) == 2
    hub.status_of = {}
    done, sent = stranger(hub, tmp_path, SHARDED)
    assert done.returncode == 0, done.stderr
    assert first not in sent and {second, third} <= {*sent}


def test_a_renamed_model_is_found_by_its_old_name(hub):
    hub.renamed = {"org/before": LLAMA}
    assert (local_directory("hf:org/before") / "model.safetensors").is_file()


def test_converted_once_and_for_all(hub, tmp_path, capsys):
    source, target = ["--from", "hf", "--input", f"hf:{LLAMA}"], ["--to", "hf", "--output"]
    call("convert", [*source, *target, str(tmp_path / "out"), "--check-logits"])
    assert "differ by at most" in capsys.readouterr().out
    _, tensors = hf_dirs.golden("hf_llama")
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(value, tensors[name])


def test_without_a_connection_the_earlier_download_is_used(hub, monkeypatch, caplog):
    directory = local_directory(f"hf:{LLAMA}")
    hub.status = 503
    assert local_directory(f"hf:{LLAMA}") == directory
    assert "answered HTTP 503" in caplog.text and "using the files in the cache" in caplog.text
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert local_directory(f"hf:{LLAMA}") == directory
    hub.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_directory(f"hf:{LLAMA}") == directory
    assert not hub.asked
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
        local_directory(f"hf:{SHARDED}")


@pytest.mark.parametrize(
    "place, words",
    [
        ("hf:org/nothing", "there is no model org/nothing on http.*or it is private.*HF_TOKEN"),
        (f"hf:{LLAMA}@v9", "org/llama has no revision v9"),
        (f"hf:{GATED}", "is gated: its owner must grant you access"),
        (
            f"hf:{PICKLED}@v1",
            r"has neither model.safetensors nor pytorch_model.bin \(it has .gguf\): for a GGUF file, run "
            r"`hf download org/old weights.gguf --revision v1 --local-dir .`, and write weights.gguf",
        ),
        (
            f"hf:{GGUF}",
            r"has no config.json: for a GGUF file \(or another of its 2 files\), run `hf download org/ggufs "
            r"a.gguf --local-dir .`, and write a.gguf in place of hf:org/ggufs",
        ),
        (f"hf:{EMPTY}", "has no config.json: transformers cannot load it"),
        ("hf:org/mamba", "hf:org/mamba: model_type 'mamba' is not supported"),
    ],
)
def test_what_cannot_be_had_is_said(hub, place, words):
    with pytest.raises(CheckpointError, match=words):
        local_directory(place)
    assert not any("safetensors" in name for name in hub.sent())


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses(hub, status):
    hub.status = status
    with pytest.raises(CheckpointError, match=f"HTTP {status}|or it is private"):
        local_directory(f"hf:{LLAMA}")


def test_a_hub_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"could not be downloaded from http://127\.0\.0\.1:9"):
        local_directory(f"hf:{LLAMA}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_with_a_wrong_hash_does_not_stay(hub, tmp_path, name):
    hub.changed = {name}
    with pytest.raises(CheckpointError, match=rf"{name} was damaged by the download .*its (SHA|hash)"):
        local_directory(f"hf:{LLAMA}")
    hub.changed = set()
    assert (local_directory(f"hf:{LLAMA}") / name).is_file()


def test_a_download_that_is_cut_off(hub, models):
    hub.cut = {"model.safetensors"}
    with pytest.raises(CheckpointError, match=r"model\.safetensors could not be downloaded from http"):
        local_directory(f"hf:{LLAMA}")
    hub.cut = set()
    directory = local_directory(f"hf:{LLAMA}")
    name = "model.safetensors"
    assert (directory / name).read_bytes() == (models[LLAMA] / name).read_bytes()


def test_without_the_library_it_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "huggingface_hub":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NotInstalledError, match=r"pip install 'ppfleetx\[hub\]'"):
        local_directory(f"hf:{LLAMA}")


def test_where_a_directory_is_asked_for_it_is_said_how():
    with pytest.raises(CheckpointError, match=r"ppfleetx convert --from hf .* --input hf:org/llama"):
        resolve_checkpoint(f"hf:{LLAMA}")
