"""A batch and sequences that grow (``Global.rampup_batch_size``, ``rampup_seq_len``): the sizes, each sample
once, resumption, other plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.commands.check import check_report
from ppfleetx.config.batch_sizes import Ramp, resolve_batch
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.data.dataloader import GlobalBatchSampler
from tests.e2e.conftest import NANO, Tool, records
from tests.e2e.program import run

RAMP = (
    "Global.global_batch_size=8",
    "Global.local_batch_size=null",
    "Global.micro_batch_size=2",
    "Global.rampup_batch_size=[2,2,12]",
    "Engine.eval_freq=0",
    "Engine.logging_freq=1",
    "Model.hidden_dropout_prob=0",  # its masks belong to a micro batch
    "Model.attention_probs_dropout_prob=0",
)


def progress(output_dir: Path) -> list[tuple[int, int, float]]:
    """(step, samples consumed, loss) of each step."""
    return [(r["step"], r["consumed_samples"], r["loss"]) for r in records(output_dir, "train")]


def test_sizes_are_those_of_megatron() -> None:
    ramp = Ramp(start=16, increment=8, samples=300, full=40)
    consumed, sizes = 0, []
    while consumed < 400:
        sizes.append(ramp.size_at(consumed))
        consumed += sizes[-1]
    by_formula = []
    consumed = 0
    while consumed < 400:  # Megatron-LM: steps of the ramp last samples / number of increments
        steps = int(consumed / (300 / ((40 - 16) // 8)))
        by_formula.append(40 if consumed > 300 else min(40, 16 + steps * 8))
        consumed += by_formula[-1]
    assert sizes == by_formula
    plan = resolve_batch(40, None, 8, None, data_size=1, ramp=(16, 8, 300))
    assert [plan.consumed_after(n) for n in (1, 2, len(sizes))] == [16, 32, consumed]
    assert plan.consumed_after(2, 400) == 480
    for steps in range(1, len(sizes) + 3):
        samples = plan.consumed_after(steps)
        assert (plan.steps_in(samples - 1), plan.steps_in(samples)) == (steps - 1, steps)


def test_no_sample_is_skipped_or_read_twice_by_any_number_of_ranks() -> None:
    ramp = Ramp(start=4, increment=4, samples=30, full=12)
    for data_size in (1, 2):
        seen = []
        samplers = [
            GlobalBatchSampler(1000, 12, 2, rank, data_size, size_at=ramp.size_at)
            for rank in range(data_size)
        ]
        for step in range(8):
            batch = [list(sampler.micro_batches(step)) for sampler in samplers]
            seen += [int(i) for parts in zip(*batch, strict=True) for part in parts for i in part]
        assert seen == list(range(len(seen)))
        later = GlobalBatchSampler(1000, 12, 2, size_at=ramp.size_at)
        later.start_after(8, data_start=8)
        assert later.global_batch(0).tolist() == list(range(ramp.size_at(8)))


def test_a_run_resumes_within_the_ramp_and_any_plan_trains_the_same(tool: Tool, tmp_path: Path) -> None:
    whole, halves, wide = tmp_path / "whole", tmp_path / "halves", tmp_path / "wide"
    tool.ok(whole, *RAMP, "Engine.max_steps=6")
    assert [consumed for _, consumed, _ in progress(whole)] == [2, 4, 8, 14, 22, 30]
    tool.ok(halves, *RAMP, "Engine.max_steps=2", "Optimizer.lr.decay_steps=6")
    tool.ok(halves, *RAMP, "Engine.max_steps=6", "Optimizer.lr.decay_steps=6", "Engine.save_load.resume=auto")
    assert progress(halves) == progress(whole)
    one_each = [word.replace("micro_batch_size=2", "micro_batch_size=1") for word in RAMP]
    tool.ok(wide, *one_each, "Engine.max_steps=6")
    for one, other in zip(progress(whole), progress(wide), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=1e-5)


def test_rates_follow_samples_also_over_a_stop(tool: Tool, tmp_path: Path) -> None:
    rates = ("Optimizer.lr.unit=sample", "Optimizer.lr.warmup_steps=5", "Optimizer.lr.decay_style=linear")
    decay = "Optimizer.weight_decay_schedule={start: 0.0, end: 0.3}"
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    tool.ok(whole, *RAMP, *rates, decay, "Engine.max_steps=6")

    def found(output_dir: Path) -> list[tuple[float, float]]:
        return [(record["lr"], record["weight_decay"]) for record in records(output_dir, "train")]

    peak, last = load_config(NANO).Optimizer.lr.max_lr, load_config(NANO).Optimizer.lr.min_lr
    expected = []
    for samples in (2, 4, 8, 14, 22, 30):  # the rate that Megatron-LM prints after so many samples
        left = (30 - samples) / (30 - 5)
        expected.append(peak * samples / 5 if samples <= 5 else last + (peak - last) * left)
    assert [rate for rate, _ in found(whole)] == pytest.approx(expected, rel=1e-9)
    assert [rate for _, rate in found(whole)] == pytest.approx([n / 100 for n in (2, 4, 8, 14, 22, 30)])

    given = (*RAMP, *rates, "Optimizer.lr.decay_steps=30")
    tool.ok(halves, *given, "Engine.max_steps=2")
    tool.ok(halves, *given, "Engine.max_steps=6", "Engine.save_load.resume=auto")
    assert [rate for rate, _ in found(halves)] == [rate for rate, _ in found(whole)]
    message = tool.refused(halves, *RAMP, "Engine.max_steps=7", "Engine.save_load.resume=auto")
    assert "unit: step now, sample saved" in message


def test_the_ramp_goes_on_where_the_data_start_from_the_beginning(tool: Tool, tmp_path: Path) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    tool.ok(whole, *RAMP, "Engine.max_steps=6", "Engine.save_load.save_steps=3")
    fresh = ("Engine.save_load.reset_data=True", "Data.Train.dataset.split=[7,3,0]")
    start = f"Engine.save_load.ckpt_dir={whole}/epoch_0_step_3"
    tool.ok(other, *RAMP, "Engine.max_steps=6", *fresh, start)
    assert [step[:2] for step in progress(other)] == [step[:2] for step in progress(whole)[3:]]
    state = open_checkpoint(other / "epoch_0_step_6").state["train"]
    assert (state["consumed_samples"], state["data_start"]) == (30, 8)


def test_check_says_whether_the_run_ends_within_the_ramp() -> None:
    within = check_report(load_config(NANO, [*RAMP, "Engine.max_steps=3"]))
    assert "from 2 by 2 to 8 in 12 sequences; the run ends within, at 8\n" in within
    beyond = check_report(load_config(NANO, [*RAMP, "Engine.max_steps=4"]))
    assert "from 2 by 2 to 8 in 12 sequences\n" in beyond


def test_epochs_are_refused(tool: Tool, tmp_path: Path) -> None:
    message = tool.refused(tmp_path / "run", *RAMP, "Engine.run_mode=epoch")
    assert "Global.rampup_batch_size" in message and "run_mode" in message


@pytest.mark.slow
def test_sequences_grow_under_any_plan_and_over_a_stop(pools, corpus: Path, tmp_path: Path) -> None:
    """The length of a step follows from the samples before it."""
    growing = {"Global.rampup_seq_len": "[4,4,64]", "Engine.max_steps": 5, "Engine.eval_freq": 0}
    plans = {
        "one": Plan(),
        "parts": Plan(mp=2, sequence_parallel=True),
        "stages": Plan(pp=2),
        "virtual": Plan(pp=2, virtual_pp_degree=2),
    }
    found = {
        name: run(pools, plan, corpus, tmp_path / name, overrides=growing) for name, plan in plans.items()
    }
    tokens = [16 * length for length in (4, 4, 8, 12, 16)]
    for name in plans:
        assert [r["tokens"] for r in records(tmp_path / name, "train")] == tokens
        for one, other in zip(found["one"], found[name], strict=True):
            assert other[1:] == pytest.approx(one[1:], rel=1e-4), name

    halves = tmp_path / "halves"
    stopped = {**growing, "Engine.max_steps": 2, "Optimizer.lr.decay_steps": 5}
    run(pools, Plan(), corpus, halves, overrides=stopped)
    resumed = {**growing, "Optimizer.lr.decay_steps": 5, "Engine.save_load.resume": "auto"}
    run(pools, Plan(), corpus, halves, overrides=resumed)
    assert [r["tokens"] for r in records(halves, "train")] == tokens


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["Global.rampup_seq_len=[8,7,10]"], "from 8 to 32 tokens by 7"),
        (["Global.rampup_seq_len=[32,8,10]"], "from 32 to 32"),
        (["Global.rampup_seq_len=[7,5,10]", "Distributed.sep_degree=2"], "rampup_seq_len"),
        *(
            ([*RAMP[:3], f"Global.rampup_batch_size={ramp}"], "rampup_batch_size")
            for ramp in ("[8,2,10]", "[2,4,10]", "[3,5,10]", "[2,3,10]")
        ),
    ],
)
def test_ramps_that_lead_nowhere_or_cannot_be_divided_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(NANO, overrides)
