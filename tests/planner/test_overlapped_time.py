"""Communication behind the passes, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, Overlap, Precision, job_of
from ppfleetx.planner.parameters import held_parameters
from ppfleetx.planner.step_time import (
    PassSeconds,
    estimate_seconds,
    step_time,
    waited_for_gradients,
    waited_for_layer,
    waited_for_parameters,
)
from tests.planner.test_parts import LAYERS, LENGTH, H
from tests.planner.test_parts import small_job as small

PASSES = PassSeconds(forward=1.0, backward=2.0)
CONFIG = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"


def _shares(job: Job) -> tuple[float, float]:
    """Of the gradients' bytes: half a bucket, and the word embedding."""
    whole = 4 * held_parameters(job, 0).trained
    return job.overlap.bucket_bytes / 2 / whole, 4 * 512 * H / whole


@pytest.mark.parametrize("one_sum", [0.5, 1.5, 4.0])
def test_sums_after_the_first_bucket_and_the_last(one_sum):
    plan = ParallelPlan(dp=2)
    job = replace(small(plan), overlap=Overlap(bucket_bytes=100_000.0))
    half, embedding = _shares(job)
    held = held_parameters(job, 0)
    waited = waited_for_gradients(job, 0, held, one_sum, PASSES)
    assert waited == pytest.approx(max(one_sum - 2.0 * (1 - half), one_sum * embedding))
    assert waited_for_gradients(replace(job, overlap=Overlap()), 0, held, one_sum, PASSES) == one_sum
    whole = replace(job, overlap=Overlap(bucket_bytes=1e9))
    assert waited_for_gradients(whole, 0, held, one_sum, PASSES) == one_sum, "one bucket hides nothing"


def test_gradients_that_leave_in_every_pass():
    job = replace(small(ParallelPlan(sharding=2, sharding_stage=2)), overlap=Overlap(bucket_bytes=100_000.0))
    held, (half, _) = held_parameters(job, 0), _shares(job)
    assert job.accumulate == 4
    assert waited_for_gradients(job, 0, held, 1.0, PASSES) == pytest.approx(2 * half), "buckets of two owners"
    assert waited_for_gradients(job, 0, held, 4.0, PASSES) == pytest.approx(3 * (4 - 3) + (4 - 2))
    assert waited_for_gradients(replace(job, overlap=Overlap()), 0, held, 1.0, PASSES) == 4.0


def test_values_wait_for_the_embedding_alone():
    job = replace(small(ParallelPlan(sharding=2)), overlap=Overlap(values=True))
    held = held_parameters(job, 0)
    share = 512 * H / held.trained
    assert waited_for_parameters(job, 0, held, 0.5, PASSES) == pytest.approx(0.5 * share)
    assert waited_for_parameters(job, 0, held, 3.0, PASSES) == pytest.approx(2.0)
    assert waited_for_parameters(replace(job, overlap=Overlap()), 0, held, 0.5, PASSES) == 0.5
    assert (waited_for_layer(job, 3.0, 2.0), waited_for_layer(job, 1.0, 2.0)) == (1.0, 0.0)
    assert waited_for_layer(replace(job, overlap=Overlap()), 1.0, 2.0) == 1.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_become_shorter_by_what_is_hidden(stage):
    """Of a real model, from the configuration's own keys; no step is shorter than its computation."""
    sharding = ["Distributed.dp_degree=1", "Distributed.sharding.sharding_degree=8"] if stage else []
    given = [*sharding, f"Distributed.sharding.sharding_stage={max(stage, 1)}"]
    off = [f"Distributed.sharding.{key}_overlap=False" for key in ("reduce", "broadcast")]
    card = load_card("A100-80GB")
    cluster = Cluster(card)
    hidden = job_of(load_config(CONFIG, given, world_size=8), card)
    waited = job_of(load_config(CONFIG, [*given, *off], world_size=8), card)
    assert waited.overlap == Overlap() and hidden.overlap == Overlap(64 * 2**20, values=True)
    one, other = step_time(hidden, cluster), step_time(waited, cluster)
    assert one.seconds < other.seconds
    assert one.seconds >= other.seconds - other.exposed_communication * cluster.straggling(8)
    assert sum(one.parts.values()) - one.parts["recompute"] == pytest.approx(one.seconds)
    assert estimate_seconds(hidden, cluster) == pytest.approx(one.seconds, rel=0.02)


def test_published_runs_hide_nothing():
    """The cards were fitted to them so."""
    shape = small().model
    bare = Job(shape, ParallelPlan(dp=2), 2, 4, LENGTH, Precision(), ("none",) * LAYERS)
    assert bare.overlap == Overlap()


def test_messages_behind_the_passes():
    """``overlap_p2p_comm`` makes the step shorter, by less than all its messages; chunks hide none."""
    card = load_card("A100-80GB")
    cluster, plan = Cluster(card, per_node=1), ["Distributed.dp_degree=1", "Distributed.pp_degree=8"]
    given = [*plan, "Global.micro_batch_size=1", "Global.local_batch_size=32", "Global.global_batch_size=32"]
    waited, hidden = (
        job_of(load_config(CONFIG, [*given, *more], world_size=8), card)
        for more in ([], ["Distributed.overlap_p2p_comm=True"])
    )
    one, other = step_time(hidden, cluster), step_time(waited, cluster)
    assert other.seconds - other.parts["pipeline"] < one.seconds < other.seconds
    assert sum(one.parts.values()) - one.parts["recompute"] == pytest.approx(one.seconds)
    assert estimate_seconds(hidden, cluster) == pytest.approx(one.seconds, rel=0.02)
    chunks = replace(hidden, plan=replace(hidden.plan, virtual_pp_degree=3))
    assert hidden.overlaps_messages and not chunks.overlaps_messages
