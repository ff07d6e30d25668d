"""Merging a checkpoint into one file, and cutting it for a plan."""

import numpy as np
import pytest

from ppfleetx.checkpoint.inspect import differences
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.reshard import merge, reshard
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.checkpoint.slices import MODEL, OPTIMIZER, whole
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.models.gpt.spec import parameter_shapes
from tests.checkpoint.checkpoints import RANK, save
from tests.models.gpt_builders import LLAMA_STYLE, tiny_config

STATE = {"train": {"step": 4, "consumed_samples": 32}, "rng": {"python": [1, 2]}}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with optimizer state in many small files, and a tokenizer beside it."""
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in parameter_shapes(tiny_config(**LLAMA_STYLE)).items():
        values = rng.standard_normal(shape).astype(np.float32)
        tensors.append(whole(name, values))
        tensors.append(whole(name, values**2, kind=OPTIMIZER, state="moment2"))
        tensors.append(whole(name, np.array([0.9], np.float32), kind=OPTIMIZER, state="beta1_pow"))
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{}")
    about = {"vocab_size": 61, "fingerprints": {"data": "abc"}, "max_file_bytes": 5000}
    save(tmp_path / "run", 4, tensors=tensors, state=STATE, run=None, **about)
    return tmp_path / "run"


def check_same(one, other):
    one, other = (open_checkpoint(resolve_checkpoint(path)) for path in (one, other))
    assert list(differences(one, other)) == []
    assert one.manifest.tensors.keys() == other.manifest.tensors.keys()
    for what in ("step", "epoch", "state", "fingerprints", "vocab_size"):
        assert getattr(one.manifest, what) == getattr(other.manifest, what)
    return other


def test_merge_makes_one_file_of_weights_and_one_of_optimizer_state(saved, tmp_path):
    cut = reshard(saved, tmp_path / "cut", ParallelPlan(mp=2, pp=2))
    merged = merge(cut, tmp_path / "merged")
    found = check_same(saved, merged)
    assert set(found.manifest.files) == {f"{RANK}/model.safetensors", f"{RANK}/optimizer.safetensors"}
    assert (tmp_path / "merged" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.parametrize("mp, pp", [(2, 1), (1, 2), (2, 2)])
def test_each_rank_finds_its_share_in_its_own_directory(saved, tmp_path, mp, pp):
    found = check_same(saved, reshard(saved, tmp_path / "cut", ParallelPlan(mp=mp, pp=pp)))
    tensors = found.manifest.tensors
    assert found.manifest.plan["mp"] == mp and len(found.manifest.ranks) == mp * pp
    qkv = tensors[MODEL, "decoder.layers.1.attention.qkv.weight", ""]
    moment = tensors[OPTIMIZER, "decoder.layers.1.attention.qkv.weight", "moment2"]
    places = [(piece.file.split("/")[0], piece.offset, piece.shape) for piece in qkv.slices]
    assert places == [
        (f"mp_{rank:02d}_sharding_00_pp_{pp - 1:02d}", (0, rank * 64 // mp), (32, 64 // mp))
        for rank in range(mp)
    ]
    assert [piece.offset for piece in moment.slices] == [piece.offset for piece in qkv.slices]
    out = tensors[MODEL, "decoder.layers.0.attention.out_proj.weight", ""]
    assert [piece.shape for piece in out.slices] == [(32 // mp, 32)] * mp
    norm = tensors[MODEL, "decoder.final_norm.weight", ""]
    assert [piece.file.split("/")[0] for piece in norm.slices] == [f"mp_00_sharding_00_pp_{pp - 1:02d}"]


def test_plans_that_do_not_divide_are_refused(saved, tmp_path):
    for plan, message in ((ParallelPlan(pp=3), "2 layers"), (ParallelPlan(mp=5), "mp = 5")):
        with pytest.raises(CheckpointError, match=message):
            reshard(saved, tmp_path / "cut", plan)
    assert not list((tmp_path / "cut").glob("epoch*"))


def test_options_that_contradict_each_other(saved, tmp_path):
    def job(**more):
        return Conversion("ppfleetx", "ppfleetx", saved, tmp_path / "x", **more)

    for bad in (job(merge=True, plan=ParallelPlan(mp=2)), job(merge=True, dtype="float16")):
        with pytest.raises(CheckpointError, match="--merge"):
            convert(bad)
    with pytest.raises(CheckpointError, match="ppfleetx to ppfleetx"):
        convert(Conversion("ppfleetx", "hf", saved, tmp_path / "x", merge=True))
