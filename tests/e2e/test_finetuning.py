"""Finetuning through the training program: it learns, equally under any plan, and resumes."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from ppfleetx.checkpoint.adapters import merge_lora
from ppfleetx.checkpoint.reshard import reshard
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.run_ownership import run_of
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.conversion.convert import Conversion, convert
from tests.e2e import finetuning
from tests.e2e.finetuning import GLUE, NUM_DEV, SFT, losses, metrics, run, settings
from tests.helpers.ranks import Pools

BAR = 0.9  # of a task whose larger class has less than 0.6
LORA = {"Model__lora__rank": 8, "Optimizer__lr__max_lr": 1e-2}
LLAMA = {
    "Model__position_embedding_type": "rope",
    "Model__num_query_groups": 2,
    "Model__hidden_act": "swiglu",
    "Model__normalization": "RMSNorm",
    "Model__tie_word_embeddings": False,
    "Model__add_bias_linear": False,
}
ONE_CARD = Plan()


@pytest.fixture(scope="module")
def pools():
    with Pools(preload=["sklearn.metrics", "ppfleetx.commands.train"]) as pools:
        yield pools


@pytest.fixture(scope="module")
def call(pools):
    """``call("evaluate", values, config=GLUE)``: a function of ``tests/e2e/finetuning.py`` on one card."""

    def result(name, values, config=GLUE):
        return pools(1).run(f"tests.e2e.finetuning:{name}", values=values, world=1, config=config)[0]

    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return finetuning.write_files(tmp_path_factory.mktemp("SST-2"))


@pytest.fixture(scope="module")
def full(pools, files, tmp_path_factory):
    """Output directory and records of a run of three epochs that trained all weights."""
    output_dir = tmp_path_factory.mktemp("full")
    return output_dir, run(pools, ONE_CARD, settings(files, output_dir))


@pytest.fixture(scope="module")
def base(pools, files, tmp_path_factory):
    """A language model of Llama's kind, trained for an epoch on the responses."""
    output_dir = tmp_path_factory.mktemp("base")
    more = {"Model__lora": "null", "Engine__num_train_epochs": 1}
    run(pools, ONE_CARD, settings(files, output_dir, **LLAMA, **more), SFT)
    return output_dir


@pytest.fixture(scope="module")
def adapters(pools, files, base, tmp_path_factory):
    """Output directory of adapters on ``base``, trained on responses with two tensor-parallel ranks."""
    output_dir = tmp_path_factory.mktemp("adapters")
    values = settings(files, output_dir, **LLAMA, **LORA, Model__lora__base=base, Engine__num_train_epochs=2)
    return output_dir, run(pools, Plan(mp=2), values, SFT)


def test_full_finetuning_learns_and_keeps_the_best(full):
    output_dir, found = full
    measured = metrics(found)
    assert measured[0]["accuracy"] < 0.7
    assert max(m["accuracy"] for m in measured) >= BAR
    kept = {path.name for path in output_dir.glob("epoch_*")}
    best = 1 + int(np.argmax([m["accuracy"] for m in measured[1:]]))
    assert f"epoch_{best}_step_{12 * best}" in (output_dir / "best").read_text()
    assert kept == {f"epoch_{best}_step_{12 * best}", "epoch_3_step_36"}, "the best, and where to go on from"
    answers = (output_dir / "predictions/SST-2.dev.tsv").read_text().splitlines()
    assert answers[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in answers[1:]] == [str(i) for i in range(NUM_DEV)]
    assert {line.split("\t")[1] for line in answers[1:]} == {"0", "1"}


def test_the_evaluation_tool_measures_the_same_and_answers_the_test_set(pools, files, full, tmp_path):
    output_dir, found = full
    test = {f"Data__Test__dataset__{key}": value for key, value in (("name", "SST2"), ("split", "test"))}
    test |= {"Data__Test__dataset__input_dir": files, "Data__Test__dataset__max_seq_len": 40}
    values = settings(files, tmp_path, Engine__save_load__ckpt_dir=output_dir / "latest", **test)
    for plan in (ONE_CARD, Plan(dp=2)):
        given = {**values, **finetuning.plan_overrides(plan)}
        measured = pools(plan.world_size).run(
            "tests.e2e.finetuning:evaluate", values=given, world=plan.world_size
        )
        assert all(one == measured[0] for one in measured)
        assert measured[0]["accuracy"] == found[-1]["metrics"]["accuracy"]
        assert measured[0]["loss"] == pytest.approx(found[-1]["loss"], rel=1e-6)
    assert len((tmp_path / "predictions/SST-2.tsv").read_text().splitlines()) == 11


def test_adapters_alone_learn(pools, files, tmp_path):
    """Saved in the background; the best is complete before it is called so."""
    more = {**LORA, "Engine__num_train_epochs": 4, "Engine__save_load__async_save": True}
    found = run(pools, ONE_CARD, settings(files, tmp_path, **more))
    measured = metrics(found)
    best = 1 + int(np.argmax([m["accuracy"] for m in measured[1:]]))
    assert f"epoch_{best}_step_{12 * best}" in (tmp_path / "best").read_text()
    assert (tmp_path / f"epoch_{best}_step_{12 * best}").is_dir()
    assert measured[0]["accuracy"] < 0.7
    assert max(m["accuracy"] for m in measured) >= BAR


CLIPPED = {"Engine__checks": "full", "Optimizer__weight_decay": 0.1, "Optimizer__grad_clip__clip_norm": 0.05}


@pytest.mark.parametrize(
    ("plans", "more", "config"),
    [
        ((Plan(dp=2), Plan(mp=2)), {**LLAMA, **CLIPPED}, GLUE),
        ((Plan(mp=2, sequence_parallel=True), Plan(sharding=2, sharding_stage=2)), {**LORA, **CLIPPED}, GLUE),
        ((Plan(dp=2), Plan(pp=2)), {**LORA, "Model__lora__dropout": 0.0}, SFT),
    ],
    ids=["full", "adapters", "responses"],
)
def test_plans_equal_one_card(pools, files, tmp_path, plans, more, config):
    """The training set does not divide by the batch, the batch's sequences have unequal lengths. The norm is
    that of what trains: all of it is clipped."""
    more = {**more, "Optimizer__lr__max_lr": 1e-3, "Engine__max_steps": 3}
    expected = run(pools, ONE_CARD, settings(files, tmp_path / "one", **more), config)
    for plan in plans:
        found = run(pools, plan, settings(files, tmp_path / str(plan), **more), config)
        assert losses(found) == pytest.approx(losses(expected), rel=1e-5), plan
        assert config == SFT or metrics(found) == metrics(expected)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [GLUE, SFT])
def test_a_run_goes_on_exactly(pools, files, base, tmp_path, config):
    """Dropout is on, in the adapters too; on responses adapters are saved alone."""
    more = {**LORA, "Model__lora__dropout": 0.1, "Model__hidden_dropout_prob": 0.1, "Engine__max_steps": 14}
    more |= {**LLAMA, "Model__lora__base": base} if config == SFT else {"Engine__num_train_epochs": 2}
    expected = run(pools, ONE_CARD, settings(files, tmp_path / "whole", **more), config)
    values = settings(files, tmp_path / "parts", **more, Engine__save_load__resume="auto")
    values |= finetuning.plan_overrides(ONE_CARD, 16)
    arguments = {"values": values, "world": 1, "config": config}
    pools(1).run("tests.e2e.finetuning:train", **arguments, stop_after=5)
    assert (tmp_path / "parts/epoch_0_step_5").is_dir()
    found = run(pools, ONE_CARD, values, config)
    numbers = [(r["step"], r["loss"], r.get("grad_norm")) for r in found]
    assert numbers == [(r["step"], r["loss"], r.get("grad_norm")) for r in expected]
    assert numbers[-1][0] == 14


def test_adapters_are_saved_alone_and_read_under_any_plan(call, files, adapters, base, tmp_path):

    output_dir, found = adapters
    saved = open_resolved(resolve_checkpoint(output_dir / "best"))
    assert all(".lora." in name for name, _ in [*saved.keys("model"), *saved.keys("optimizer")])
    values = settings(files, tmp_path, **LLAMA, **LORA, Model__lora__base=base)
    values["Engine.save_load.ckpt_dir"] = str(output_dir)
    best = min(record["loss"] for record in found if record["kind"] == "eval")
    assert best < found[0]["loss"]
    one = call("evaluate", values, SFT)
    assert one["loss"] == pytest.approx([r for r in found if r["kind"] == "eval"][-1]["loss"], rel=1e-5)


def test_merged_and_unmerged_give_equal_logits(call, files, adapters, base, tmp_path):

    output_dir, _ = adapters
    moved = reshard(resolve_checkpoint(base), tmp_path / "moved", Plan(mp=2))  # in other files
    merged = merge_lora(output_dir, tmp_path / "merged", moved)
    values = settings(files, tmp_path, **LLAMA, **LORA, Model__lora__base=base)
    values |= {"Engine.save_load.ckpt_dir": str(output_dir)}
    plain = settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=merged)
    start = settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=base)
    beside, within, before = (np.array(call("logits", given, SFT)) for given in (values, plain, start))
    np.testing.assert_allclose(within, beside, rtol=0, atol=1e-5)
    assert np.abs(before - beside).max() > 0.01, "the adapters do something"


def test_merging_a_classifier_of_gpt2s_kind(pools, call, files, tmp_path):
    """All weights are in the checkpoint here, the head trained beside the adapters. It is not read as if
    there were no adapters."""

    output_dir = tmp_path / "run"
    run(pools, ONE_CARD, settings(files, output_dir, **LORA, Engine__max_steps=4))
    merged = merge_lora(output_dir, tmp_path / "merged")
    values = settings(files, tmp_path, **LORA, Engine__save_load__ckpt_dir=output_dir)
    plain = settings(files, tmp_path, Engine__save_load__ckpt_dir=merged)
    beside, within = (np.array(call("logits", given)) for given in (values, plain))
    np.testing.assert_allclose(within, beside, rtol=0, atol=1e-5)
    without = settings(files, tmp_path / "x", Engine__save_load__ckpt_dir=output_dir)
    assert "was trained with adapters" in call("refused", without)
    for source, words in ((output_dir, "make one model of both first"), (merged, "is a classifier")):
        with pytest.raises(CheckpointError, match=words):
            convert(Conversion("ppfleetx", "hf", source, tmp_path / "hf"))


def test_a_run_killed_before_it_named_its_best_names_it(pools, files, base, tmp_path):
    output_dir = shutil.copytree(base, tmp_path / "run")
    (output_dir / "best").unlink()
    more = {"Model__lora": "null", "Engine__num_train_epochs": 1, "Engine__save_load__resume": "auto"}
    run(pools, ONE_CARD, settings(files, output_dir, **LLAMA, **more), SFT)
    assert (output_dir / "best").read_text() == (base / "best").read_text()


def test_a_pretrained_model_gets_a_new_head(pools, call, files, base, tmp_path):
    """Its own head is left out; a checkpoint without a classification head is not evaluated."""
    values = settings(files, tmp_path, **LLAMA, Engine__save_load__init_from=base, Engine__max_steps=2)
    found = run(pools, ONE_CARD, values)
    assert [record["step"] for record in found if record["kind"] == "train"] == [1, 2]
    given = settings(files, tmp_path / "x", **LLAMA, Engine__save_load__ckpt_dir=base)
    message = call("refused", given)
    assert "before finetuning" in message
    assert "Engine.save_load.init_from" in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"Model__lora__base": "{other}"}, "were trained on another base .* than Model.lora.base"),
        ({}, "holds adapters alone; name the checkpoint"),
        ({"Model__lora__base": "{base}", "Model__lora__alpha": 4.0}, "the adapters would count differently"),
    ],
)
def test_adapters_refuse_what_they_were_not_trained_on(
    pools, call, files, adapters, base, tmp_path, more, words
):
    other = tmp_path / "other"
    if "{other}" in str(more):
        start = {"Model__lora": "null", "Engine__max_steps": 1, "Global__seed": 7}
        run(pools, ONE_CARD, settings(files, other, **LLAMA, **start), SFT)
    more = {key: str(value).format(other=other, base=base) for key, value in more.items()}
    values = settings(files, tmp_path / "run", **LLAMA, **LORA, **more)
    values["Engine.save_load.ckpt_dir"] = str(adapters[0])
    message = call("refused", values, SFT)
    assert re.search(words, message), message


def test_adapters_in_the_directory_of_their_base_leave_it_alone(pools, call, files, base, tmp_path):
    """It is refused; when it is to be overwritten, the base stays and everything works from it."""

    output_dir = shutil.copytree(base, tmp_path / "run")
    more = {**LLAMA, **LORA, "Model__lora__base": output_dir, "Engine__num_train_epochs": 2}
    overwriting = settings(files, output_dir, **more, Engine__save_load__overwrite=True)
    message = call("refused", overwriting, SFT)
    assert "holds epoch_1_step_12, and this run would save under the same name" in message
    more["Global__global_batch_size"] = 32  # six steps in an epoch
    values = settings(files, output_dir, **more)
    before = contents(output_dir)
    message = call("refused", values, SFT)
    assert "already holds a run (checkpoint epoch_1_step_12, run_id, metrics.jsonl" in message
    assert contents(output_dir) == before

    for key, value, steps in (("overwrite", True, 10), ("resume", "auto", 12)):
        go_on = {f"Engine__save_load__{key}": value, "Engine__max_steps": steps}
        go_on |= {"Engine__save_load__lr_schedule": "config"}
        run(pools, ONE_CARD, settings(files, output_dir, **more, **go_on), SFT)
    kept = {path.name: run_of(path) for path in output_dir.glob("epoch_*")}
    assert kept["epoch_1_step_12"] == run_of(base / "epoch_1_step_12") != kept["epoch_2_step_12"]
    assert set(kept) <= {"epoch_1_step_12", "epoch_1_step_6", "epoch_1_step_10", "epoch_2_step_12"}
    merged = merge_lora(output_dir, tmp_path / "merged")  # which base, the checkpoint knows
    plain = settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=merged)
    last = [r["loss"] for r in finetuning.records(output_dir) if r["kind"] == "eval"][-1]
    assert call("evaluate", plain, SFT)["loss"] == pytest.approx(last, rel=1e-5)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_cannot_be_merged(full, adapters, tmp_path):

    with pytest.raises(CheckpointError, match="not trained with adapters"):
        merge_lora(full[0], tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"holds no model tensor head\.weight"):
        merge_lora(adapters[0], tmp_path / "merged", full[0])
    with pytest.raises(CheckpointError, match="exists already"):
        merge_lora(adapters[0], full[0])
