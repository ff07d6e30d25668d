"""A checkpoint that does not fit is rejected with a specific message, and accepted with a specific key."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.output_dir import write_latest
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.checkpoint.slices import TensorSlice, whole
from tests.e2e.program import losses
from tests.faults.program import Program
from tests.helpers.texts import small_tokenizer

NORM = "decoder.final_norm.bias"


@pytest.fixture(scope="module")
def trained(pools, corpus, tmp_path_factory):
    """Output directory of four steps, with a checkpoint of each."""
    program = Program(pools, corpus, tmp_path_factory.mktemp("trained"))
    assert program.call()[0].error is None
    return program.output_dir


class Rewritten:
    """The contents of a checkpoint, to be changed and saved elsewhere."""

    def __init__(self, path):
        source = open_checkpoint(path)
        self.manifest, self.state = source.manifest, dict(source.state)
        self.fingerprints = dict(source.manifest.fingerprints)
        self.tensors = {
            key: TensorSlice(
                entry.name,
                entry.kind,
                entry.dtype,
                entry.shape,
                (0,) * len(entry.shape),
                entry.shape,
                source.read(entry.name, entry.kind, entry.state),
                entry.state,
                None,
                entry.vocab_dim,
            )
            for key, entry in source.manifest.tensors.items()
        }

    def save(self, directory):
        return save_checkpoint(
            directory,
            epoch=self.manifest.epoch,
            step=self.manifest.step,
            tensors=self.tensors.values(),
            state=self.state,
            vocab_size=self.manifest.vocab_size,
            config=self.manifest.config,
            fingerprints=self.fingerprints,
        )


def drop_a_parameter(it):
    del it.tensors["model", NORM, ""]


def add_a_parameter(it):
    it.tensors["extra"] = whole("decoder.layers.9.scale", np.ones(3, np.float32))


def widen_a_parameter(it):
    it.tensors["model", NORM, ""] = whole(NORM, np.ones(40, np.float32))


def drop_moments(it):
    it.tensors = {key: piece for key, piece in it.tensors.items() if piece.state != "moment1"}


def spoil_generators(it):
    it.state["rng"] = {**it.state["rng"], "python": {"version": 3, "words": [1], "gauss": None}}


def other_vocabulary(it):
    it.manifest = replace(it.manifest, vocab_size=500)


def nothing(it):
    pass


LR = "Optimizer.lr.max_lr"
SPLIT = "Data.Train.dataset.split"
ALLOW = r"; with Engine.save_load.{}=True "
CASES = {
    "missing": (
        drop_a_parameter,
        {},
        rf"missing 1: {NORM}{ALLOW.format('allow_missing')}",
        {"allow_missing": True},
    ),
    "extra": (
        add_a_parameter,
        {},
        rf"extra 1: decoder.layers.9.scale{ALLOW.format('allow_extra')}",
        {"allow_extra": True},
    ),
    "shape": (
        widen_a_parameter,
        {},
        rf"{NORM} has shape \[40\] .* and \[32\] in the model{ALLOW.format('allow_other_shapes')}",
        {"allow_other_shapes": True},
    ),
    "vocabulary": (
        other_vocabulary,
        {},
        rf"vocabulary of 500, .* of 512: .* different tokenizers{ALLOW.format('allow_other_shapes')}",
        {"allow_other_shapes": True},
    ),
    "optimizer": (
        drop_moments,
        {},
        r"it lacks \d+: .*; set Engine.save_load.load_optim to False",
        {"load_optim": False},
    ),
    "generators": (spoil_generators, {}, "set Engine.save_load.load_rng to False", {"load_rng": False}),
    "data": (nothing, {SPLIT: [7, 3, 0]}, "Engine.save_load.reset_data=True starts", {"reset_data": True}),
    "schedule": (
        nothing,
        {LR: 0.5},
        r"max_lr: 0.5 now, 0.001 saved.*set Engine.save_load.lr_schedule to checkpoint .* or config",
        {"lr_schedule": "config"},
    ),
    "function": (
        nothing,
        {"Model.hidden_act": "relu"},
        r"was trained with Model.hidden_act = 'gelu', .* 'relu'.*; set Model.hidden_act to 'gelu'",
        {},
    ),
}


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("case", CASES)
def test_each_difference_has_its_message_and_its_way_to_go_on(pools, corpus, trained, tmp_path, case):
    change, overrides, message, way = CASES[case]
    rewritten = Rewritten(trained / "epoch_0_step_2")
    change(rewritten)
    path = rewritten.save(tmp_path / "changed")
    program = Program(pools, corpus, tmp_path / "refused", ckpt_dir=path)
    program.values |= overrides
    (outcome,) = program.call()
    assert outcome.error.startswith("CheckpointError: ") and re.search(message, outcome.error), outcome.error
    assert not list((tmp_path / "refused").glob("epoch_*"))
    program = Program(pools, corpus, tmp_path / "going on", ckpt_dir=path, **way)
    program.values |= overrides if way else {}
    (outcome,) = program.call()
    assert outcome.error is None, outcome.error
    assert [step for step, *_ in losses(program.output_dir)] == [3, 4]


def test_another_tokenizer(pools, corpus, trained, tmp_path):
    """`init_from` starts a new run from such weights."""
    rewritten = Rewritten(trained / "epoch_0_step_2")
    rewritten.fingerprints["tokenizer"] = "that of another"
    path = rewritten.save(tmp_path / "changed")
    small_tokenizer().save(tmp_path / "tokenizer")
    for key, refused in (("ckpt_dir", True), ("init_from", False)):
        program = Program(pools, corpus, tmp_path / key, **{key: path})
        program.values["Data.tokenizer"] = f"{{dir: {tmp_path / 'tokenizer'}}}"
        (outcome,) = program.call()
        if refused:
            assert "another tokenizer than Data.tokenizer names" in outcome.error
            assert "Engine.save_load.init_from" in outcome.error
        else:
            assert outcome.error is None, outcome.error
    assert [step for step, *_ in losses(tmp_path / "init_from")] == [1, 2, 3, 4]


def damaged_copy(trained, output_dir, how):
    """The run's directory with its newest checkpoint damaged."""
    shutil.copytree(trained, output_dir)
    newest = output_dir / "epoch_0_step_4"
    if how == "flipped":
        data = next(newest.rglob("model.safetensors"))
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    elif how == "torn":
        data = next(newest.rglob("optimizer.safetensors"))
        data.write_bytes(data.read_bytes()[:-1])
    else:
        (newest / "COMPLETE").unlink()
    return newest


@pytest.mark.parametrize("how", ["flipped", "torn", "incomplete"])
def test_a_damaged_newest_checkpoint(pools, corpus, trained, tmp_path, how):
    newest = damaged_copy(trained, tmp_path / "run", how)
    good = newest.with_name("epoch_0_step_3")
    for way in ({"resume": True}, {"ckpt_dir": tmp_path / "run"}, {"ckpt_dir": newest}):
        (outcome,) = Program(pools, corpus, tmp_path / "run", **way).call()
        assert outcome.error.startswith("CheckpointError: ")
        assert f"{newest}" in outcome.error
        assert f"the newest good checkpoint is {good}: continue there with" in outcome.error
    program = Program(pools, corpus, tmp_path / "run", resume="auto")
    assert program.call()[0].error is None
    said = program.pool._logs[0].read_text()
    assert f"skipped a damaged checkpoint: {'' if how != 'torn' else 'checkpoint file '}" in said
    assert f"resuming {good} (global step 3)" in said
    assert losses(tmp_path / "run") == losses(trained)
    assert open_checkpoint(newest).step == 4


def test_latest_left_behind_by_a_kill_is_mended(pools, corpus, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    write_latest(tmp_path / "run", "epoch_0_step_3")
    assert Program(pools, corpus, tmp_path / "run", resume="auto").call()[0].error is None
    assert resolve_checkpoint(tmp_path / "run").name == "epoch_0_step_4"
