"""Finetuning through the training program: it learns, equally under any plan, and resumes."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
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
    pools = Pools(preload=["sklearn.metrics", "ppfleetx.commands.train"])
    yield pools
    pools.close()


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


@pytest.mark.parametrize(
    ("plans", "more"),
    [
        ((Plan(dp=2), Plan(mp=2)), LLAMA),
        ((Plan(mp=2, sequence_parallel=True), Plan(sharding=2, sharding_stage=2)), LORA),
    ],
    ids=["full", "adapters"],
)
def test_plans_equal_one_card(pools, files, tmp_path, plans, more):
    """The training set does not divide by the batch, the batch's sequences have unequal lengths. The norm is
    that of what trains: all of it is clipped."""
    more = {**more, "Optimizer__lr__max_lr": 1e-3, "Engine__max_steps": 3, "Engine__checks": "full"}
    more |= {"Optimizer__weight_decay": 0.1, "Optimizer__grad_clip__clip_norm": 0.05}
    expected = run(pools, ONE_CARD, settings(files, tmp_path / "one", **more))
    for plan in plans:
        found = run(pools, plan, settings(files, tmp_path / str(plan), **more))
        assert losses(found) == pytest.approx(losses(expected), rel=1e-5), plan
        assert metrics(found) == metrics(expected)


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


def test_responses_are_learnt_alike_under_any_plan(pools, files, tmp_path):
    more = {**LORA, "Model__lora__dropout": 0.0, "Engine__max_steps": 3, "Optimizer__lr__max_lr": 1e-3}
    expected = run(pools, ONE_CARD, settings(files, tmp_path / "one", **more), SFT)
    for plan in (Plan(dp=2), Plan(pp=2)):
        found = run(pools, plan, settings(files, tmp_path / f"pp{plan.pp}", **more), SFT)
        assert losses(found) == pytest.approx(losses(expected), rel=1e-5)


def test_adapters_are_saved_alone_and_read_under_any_plan(pools, files, adapters, base, tmp_path):
    from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint

    output_dir, found = adapters
    saved = open_resolved(resolve_checkpoint(output_dir / "best"))
    assert all(".lora." in name for name, _ in [*saved.keys("model"), *saved.keys("optimizer")])
    values = settings(files, tmp_path, **LLAMA, **LORA, Model__lora__base=base)
    values["Engine.save_load.ckpt_dir"] = str(output_dir)
    best = min(record["loss"] for record in found if record["kind"] == "eval")
    assert best < found[0]["loss"]
    one = pools(1).run("tests.e2e.finetuning:evaluate", values=values, world=1, config=SFT)[0]
    assert one["loss"] == pytest.approx([r for r in found if r["kind"] == "eval"][-1]["loss"], rel=1e-5)


def test_merged_and_unmerged_give_equal_logits(pools, files, adapters, base, tmp_path):
    from ppfleetx.checkpoint.adapters import merge_lora
    from ppfleetx.checkpoint.reshard import reshard
    from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint

    output_dir, _ = adapters
    moved = reshard(
        resolve_checkpoint(base), tmp_path / "moved", Plan(mp=2)
    )  # the same weights in other files
    merged = merge_lora(output_dir, tmp_path / "merged", moved)
    values = settings(files, tmp_path, **LLAMA, **LORA, Model__lora__base=base)
    values |= {"Engine.save_load.ckpt_dir": str(output_dir)}
    plain = settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=merged)
    start = settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=base)
    call = "tests.e2e.finetuning:logits"
    beside, within, before = (
        np.array(pools(1).run(call, values=given, world=1, config=SFT)[0]) for given in (values, plain, start)
    )
    np.testing.assert_allclose(within, beside, rtol=0, atol=1e-5)
    assert np.abs(before - beside).max() > 0.01, "the adapters do something"


def test_merging_a_classifier_of_gpt2s_kind(pools, files, tmp_path):
    """All weights are in the checkpoint here, the head trained beside the adapters. It is not read as if
    there were no adapters."""
    from ppfleetx.checkpoint.adapters import merge_lora
    from ppfleetx.config.errors import CheckpointError
    from ppfleetx.conversion.convert import Conversion, convert

    output_dir = tmp_path / "run"
    run(pools, ONE_CARD, settings(files, output_dir, **LORA, Engine__max_steps=4))
    merged = merge_lora(output_dir, tmp_path / "merged")
    values = settings(files, tmp_path, **LORA, Engine__save_load__ckpt_dir=output_dir)
    plain = settings(files, tmp_path, Engine__save_load__ckpt_dir=merged)
    call = "tests.e2e.finetuning:logits"
    beside, within = (np.array(pools(1).run(call, values=v, world=1)[0]) for v in (values, plain))
    np.testing.assert_allclose(within, beside, rtol=0, atol=1e-5)
    without = settings(files, tmp_path / "x", Engine__save_load__ckpt_dir=output_dir)
    (message,) = pools(1).run("tests.e2e.finetuning:refused", values=without, world=1)
    assert "was trained with adapters" in message
    for source, words in ((output_dir, "make one model of both first"), (merged, "is a classifier")):
        with pytest.raises(CheckpointError, match=words):
            convert(Conversion("ppfleetx", "hf", source, tmp_path / "hf"))


def test_a_run_killed_before_it_named_its_best_names_it(pools, files, base, tmp_path):
    output_dir = shutil.copytree(base, tmp_path / "run")
    (output_dir / "best").unlink()
    more = {"Model__lora": "null", "Engine__num_train_epochs": 1, "Engine__save_load__resume": "auto"}
    run(pools, ONE_CARD, settings(files, output_dir, **LLAMA, **more), SFT)
    assert (output_dir / "best").read_text() == (base / "best").read_text()


def test_a_pretrained_model_gets_a_new_head(pools, files, base, tmp_path):
    """Its own head is left out; a checkpoint without a classification head is not evaluated."""
    values = settings(files, tmp_path, **LLAMA, Engine__save_load__init_from=base, Engine__max_steps=2)
    found = run(pools, ONE_CARD, values)
    assert [record["step"] for record in found if record["kind"] == "train"] == [1, 2]
    given = settings(files, tmp_path / "x", **LLAMA, Engine__save_load__ckpt_dir=base)
    (message,) = pools(1).run("tests.e2e.finetuning:refused", values=given, world=1)
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
    pools, files, adapters, base, tmp_path_factory, tmp_path, more, words
):
    other = tmp_path / "other"
    if "{other}" in str(more):
        start = {"Model__lora": "null", "Engine__max_steps": 1, "Global__seed": 7}
        run(pools, ONE_CARD, settings(files, other, **LLAMA, **start), SFT)
    more = {key: str(value).format(other=other, base=base) for key, value in more.items()}
    values = settings(files, tmp_path / "run", **LLAMA, **LORA, **more)
    values["Engine.save_load.ckpt_dir"] = str(adapters[0])
    (message,) = pools(1).run("tests.e2e.finetuning:refused", values=values, world=1, config=SFT)
    assert re.search(words, message), message


def test_adapters_in_the_directory_of_their_base_leave_it_alone(pools, files, base, tmp_path):
    """It is refused; when it is to be overwritten, the base stays and everything works from it."""
    from ppfleetx.checkpoint.adapters import merge_lora
    from ppfleetx.checkpoint.run_ownership import run_of

    output_dir = shutil.copytree(base, tmp_path / "run")
    more = {**LLAMA, **LORA, "Model__lora__base": output_dir, "Engine__num_train_epochs": 2}
    (message,) = pools(1).run(
        "tests.e2e.finetuning:refused",
        values=settings(files, output_dir, **more, Engine__save_load__overwrite=True),
        world=1,
        config=SFT,
    )
    assert "holds epoch_1_step_12, and this run would save under the same name" in message
    more["Global__global_batch_size"] = 32  # six steps in an epoch
    values = settings(files, output_dir, **more)
    before = {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()}
    (message,) = pools(1).run("tests.e2e.finetuning:refused", values=values, world=1, config=SFT)
    assert "already holds a run (checkpoint epoch_1_step_12, run_id, metrics.jsonl" in message
    assert {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()} == before

    for key in ("overwrite", "resume"):
        go_on = {f"Engine__save_load__{key}": {"overwrite": True, "resume": "auto"}[key]}
        steps = {"Engine__max_steps": {"overwrite": 10, "resume": 12}[key]}
        steps |= {"Engine__save_load__lr_schedule": "config"}
        run(pools, ONE_CARD, settings(files, output_dir, **more, **go_on, **steps), SFT)
    kept = {path.name: run_of(path) for path in output_dir.glob("epoch_*")}
    assert kept["epoch_1_step_12"] == run_of(base / "epoch_1_step_12") != kept["epoch_2_step_12"]
    assert set(kept) <= {"epoch_1_step_12", "epoch_1_step_6", "epoch_1_step_10", "epoch_2_step_12"}
    merged = merge_lora(output_dir, tmp_path / "merged")  # which base, the checkpoint knows
    (loss,) = pools(1).run(
        "tests.e2e.finetuning:evaluate",
        values=settings(files, tmp_path, **LLAMA, Model__lora="null", Engine__save_load__ckpt_dir=merged),
        world=1,
        config=SFT,
    )
    last = [r["loss"] for r in finetuning.records(output_dir) if r["kind"] == "eval"][-1]
    assert loss["loss"] == pytest.approx(last, rel=1e-5)


def test_what_cannot_be_merged(full, adapters, tmp_path):
    from ppfleetx.checkpoint.adapters import merge_lora
    from ppfleetx.config.errors import CheckpointError

    with pytest.raises(CheckpointError, match="not trained with adapters"):
        merge_lora(full[0], tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"holds no model tensor head\.weight"):
        merge_lora(adapters[0], tmp_path / "merged", full[0])
    with pytest.raises(CheckpointError, match="exists already"):
        merge_lora(adapters[0], full[0])
