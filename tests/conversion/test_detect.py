"""Checkpoints of other programs where one of ours is expected: what they are, and how to convert them."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.detect import described
from tests.conversion import hf_dirs

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "ppfleetx/configs/debug/gpt_nano.yaml"


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return paths[0]


def make_hf(root):
    return hf_dirs.write(root / "hf", "hf_gpt2")


def make_hf_file(root):
    return make_hf(root) / "model.safetensors"


def make_paddle(root):
    path = hf_dirs.write(root / "paddle", "hf_llama")
    save_file(hf_dirs.golden("hf_llama")[1], path / "model.safetensors", {"format": "np"})
    return path


def make_bert(root):
    return hf_dirs.write(root / "bert", "hf_gpt2", model_type="bert")


def make_bare(root):
    path = make_hf(root)
    (path / "config.json").unlink()
    return path


def make_bare_file(root):
    return make_bare(root) / "model.safetensors"


def make_cache(root):
    cache = root / "models--gpt2"
    hf_dirs.write(cache / "snapshots" / "607a30d", "hf_gpt2")
    (cache / "refs").mkdir()
    return cache


def make_pdparams(root):
    return touch(root / "nlp" / "model_state.pdparams", root / "nlp" / "config.json")


def make_fleetx_file(root):
    return touch(root / "GPT_345M" / "model.pdparams")


def make_megatron(root):
    touch(root / "mega" / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt")
    return root / "mega"


def make_megatron_dist(root):
    touch(root / "dist" / "iter_0000100" / "__0_0.distcp", root / "dist" / "iter_0000100" / "common.pt")
    touch(root / "dist" / "latest_checkpointed_iteration.txt")
    return root / "dist"


def make_torch_dist(root):
    touch(root / "dcp" / "__0_0.distcp", root / "dcp" / ".metadata")
    return root / "dcp"


def make_paddle_dist(root):
    touch(root / "flex" / "0_0.distcp", root / "flex" / "0.metadata")
    return root / "flex"


CONVERT = "Convert it first: ppfleetx convert --from"
CASES = {
    make_hf: rf"is a gpt2 of Hugging Face\. {CONVERT} hf --to ppfleetx --input .*/hf --output hf-ppfleetx,",
    make_hf_file: rf"model.safetensors is one file of a checkpoint: .* {CONVERT} hf .* --input .*/hf --o",
    lambda root: make_hf(root) / "config.json": rf"config.json is one file of a checkpoint: .* {CONVERT} hf",
    lambda root: touch(make_hf(root) / "model.safetensors.index.json"): "is one file of a checkpoint: ",
    lambda root: touch(root / "notes.txt"): r"is a file\. A checkpoint is a directory, or the file latest or",
    make_paddle: rf"is a llama of PaddleNLP or PaddleFormers\. {CONVERT} hf",
    make_bert: "cannot be converted: model_type 'bert' is not supported",
    make_bare: r"holds weights and no config\.json",
    make_bare_file: r"holds only tensors.*config\.json beside it",
    make_cache: rf"Hugging Face's cache of a model: .*607a30d is a gpt2 of Hugging Face\. {CONVERT} hf",
    make_pdparams: "one file of a checkpoint: .* cannot be converted: .*not valid JSON",
    make_fleetx_file: r"Name its directory, which needs no conversion: .*GPT_345M$",
    make_megatron: rf"is a checkpoint of Megatron-LM\. {CONVERT} megatron --to ppfleetx --input .*/mega",
    make_megatron_dist: r"Megatron-LM in its distributed format \(\.distcp\).*--from megatron",
    make_torch_dist: r"distributed checkpoint of PyTorch \(\.distcp\), which is not read",
    make_paddle_dist: r"distributed checkpoint of Paddle .*save_to_hf=True",
    lambda root: touch(
        root / "x" / "mp_rank_00" / "model_optim_rng.pt"
    ): rf"{CONVERT} megatron .*/x --output",
    lambda root: touch(root / "weights.pt"): "is a file of PyTorch's",
    lambda root: touch(root / "model.gguf"): rf"is a GGUF file\. {CONVERT} gguf",
    lambda root: touch(root / "lm.pdparams"): r"is a file of Paddle's.*model_state\.pdparams of PaddleNLP",
    lambda root: touch(root / "peft" / "adapter_config.json").parent: "holds adapters of PEFT",
    lambda root: (
        touch(root / "tp" / "model_state.tp00.pdparams").parent
    ): "tensor-parallel parts of PaddleNLP",
    lambda root: touch(root / "out" / "rank_0" / "model.pdiparams").parents[1]: "is an exported program",
}


@pytest.mark.parametrize("make, words", CASES.items(), ids=range(len(CASES)))
def test_a_foreign_checkpoint_says_what_it_is(tmp_path, make, words):
    place = make(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_checkpoint(place)
    assert str(caught.value).startswith(str(place))
    for key in ("Engine.save_load.init_from", "Engine.save_load.ckpt_dir", "Model.lora.base"):
        with pytest.raises(ConfigError, match=words) as caught:
            check_report(load_config(NANO, [f"{key}={place}"]))
        assert str(caught.value).startswith(f"{key} = ")
        assert f"(-o override 1): {place} " in str(caught.value)


def test_what_is_ours_or_fleetxs_or_absent_is_passed_over(tmp_path):
    convert(Conversion("hf", "ppfleetx", hf_dirs.write(tmp_path / "hf", "hf_gpt2"), tmp_path / "run"))
    touch(tmp_path / "fleetx" / "mp_00_sharding_00_pp_00" / "model.pdparams")
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "config-alone" / "config.json")
    step = "run/epoch_0_step_0"
    ours = ("run", "run/latest", step, f"{step}/mp_00_sharding_00_pp_00")
    for name in (*ours, "fleetx", "empty", "none", "config-alone"):
        assert described(tmp_path / name) is None, name
        assert "is valid" in check_report(
            load_config(NANO, [f"Engine.save_load.init_from={tmp_path / name}"])
        )


def test_the_command_it_gives_works(tmp_path):
    """As it stands, from the root of the project; what it makes can be named in the directory's place."""
    sentence = described(hf_dirs.write(tmp_path / "my model", "hf_gpt2"))
    _, _, rest = sentence.partition("Convert it first: ")
    command, _, name = rest.partition(", and name ")
    arguments = [sys.executable, "-m", *shlex.split(command)]
    arguments[-1] = str(tmp_path / arguments[-1])
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert resolve_checkpoint(tmp_path / name.removesuffix(" here")).name == "epoch_0_step_0"
