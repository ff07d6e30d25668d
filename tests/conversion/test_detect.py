"""Checkpoints of other programs where one of ours is expected: what they are, and how to convert them."""

import shlex
import shutil
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
EMPTY_FILES = """
indexed/model.safetensors.index.json notes.txt weights.pt model.gguf lm.pdparams peft/adapter_config.json
nlp/model_state.pdparams nlp/config.json tp/model_state.tp00.pdparams GPT_345M/model.pdparams
mega/iter_0000100/mp_rank_00/model_optim_rng.pt rank/mp_rank_00/model_optim_rng.pt
dist/iter_0000100/__0_0.distcp dist/iter_0000100/common.pt dist/latest_checkpointed_iteration.txt
dcp/__0_0.distcp dcp/.metadata flex/0_0.distcp flex/0.metadata out/rank_0/model.pdiparams
config-alone/config.json shards/model-00001-of-00002.safetensors fleetx/mp_00_sharding_00_pp_00/model.pdparams
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("others")
    hf_dirs.write(root / "hf", "hf_gpt2")
    hf_dirs.write(root / "bert", "hf_gpt2", model_type="bert")
    hf_dirs.write(root / "paddle", "hf_llama")
    save_file(hf_dirs.golden("hf_llama")[1], root / "paddle/model.safetensors", {"format": "np"})
    for copy in ("indexed", "bare", "models--gpt2/snapshots/607a30d"):
        shutil.copytree(root / "hf", root / copy)
    (root / "bare/config.json").unlink()
    (root / "models--gpt2/refs").mkdir()
    (root / "empty").mkdir()
    (root / "shards").mkdir()
    shutil.copy(root / "hf/config.json", root / "shards")
    for name in EMPTY_FILES.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


CONVERT = "Convert it first: ppfleetx convert --from"
CASES = {
    "hf": rf"is a gpt2 of Hugging Face\. {CONVERT} hf --to ppfleetx --input .*/hf --output hf-ppfleetx,",
    "hf/model.safetensors": rf"is one file of a checkpoint: .* {CONVERT} hf .* --input .*/hf --o",
    "hf/config.json": rf"is one file of a checkpoint: .* {CONVERT} hf",
    "indexed/model.safetensors.index.json": "is one file of a checkpoint: ",
    "notes.txt": r"is a file\. A checkpoint is a directory",
    "paddle": rf"is a llama of PaddleNLP or PaddleFormers\. {CONVERT} hf",
    "bert": "cannot be converted: model_type 'bert'",
    "bare": r"holds weights and no config\.json",
    "bare/model.safetensors": r"holds only tensors.*config\.json beside it",
    "models--gpt2": rf"cache of a model: .*607a30d is a gpt2 of Hugging Face\. {CONVERT} hf",
    "nlp/model_state.pdparams": "one file of a checkpoint: .* cannot be converted: .*not valid JSON",
    "GPT_345M/model.pdparams": "needs no conversion: .*GPT_345M$",
    "mega": rf"is a checkpoint of Megatron-LM\. {CONVERT} megatron --to ppfleetx --input .*/mega",
    "dist": r"Megatron-LM in its distributed format .*--from megatron",
    "dcp": r"distributed checkpoint of PyTorch",
    "flex": r"distributed checkpoint of Paddle .*save_to_hf=True",
    "rank/mp_rank_00/model_optim_rng.pt": rf"{CONVERT} megatron .*/rank --output",
    "weights.pt": "is a file of PyTorch's",
    "model.gguf": rf"is a GGUF file\. {CONVERT} gguf",
    "lm.pdparams": r"is a file of Paddle's.*model_state\.pdparams of PaddleNLP",
    "peft": "holds adapters of PEFT",
    "shards": r"holds no weights that are read: neither .*\(here: model-00001-of-00002\.safetensors\)",
    "tp": "tensor-parallel parts of PaddleNLP",
    "out": "is an exported program",
}


@pytest.mark.parametrize("name", CASES)
def test_a_foreign_checkpoint_says_what_it_is(tree, name):
    place = tree / name
    with pytest.raises(CheckpointError, match=CASES[name]) as caught:
        resolve_checkpoint(place)
    assert str(caught.value).startswith(str(place))
    for key in ("Engine.save_load.init_from", "Engine.save_load.ckpt_dir", "Model.lora.base"):
        with pytest.raises(ConfigError, match=CASES[name]) as caught:
            check_report(load_config(NANO, [f"{key}={place}"]))
        assert str(caught.value).startswith(f"{key} = ")
        assert f"(-o override 1): {place} " in str(caught.value)


def test_what_is_ours_or_fleetxs_or_absent_is_passed_over(tree, tmp_path):
    convert(Conversion("hf", "ppfleetx", tree / "hf", tmp_path / "run"))
    step = tmp_path / "run/epoch_0_step_0"
    ours = (tmp_path / "run", tmp_path / "run/latest", step, step / "mp_00_sharding_00_pp_00")
    for place in (*ours, *(tree / name for name in ("fleetx", "empty", "none", "config-alone"))):
        assert described(place) is None, place
        assert "is valid" in check_report(load_config(NANO, [f"Engine.save_load.init_from={place}"]))


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
