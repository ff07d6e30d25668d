"""What a search looks at, beside what each plan is predicted to do."""

from dataclasses import replace

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.job import job_of
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.plan_option import plan_text, read_unresolved
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.search import search

BIG = "ppfleetx/configs/nlp/gpt/pretrain_gpt_175B_mp8_pp16.yaml"
CLUSTER = Cluster(load_card("A100-80GB"), per_node=1, network=12.5e9)
# Sixteen layers on sixteen machines of one card: long pipelines of whole stages.
SHORT = [
    *("Model.num_layers=16", "Model.virtual_pp_degree=1", "Model.sequence_parallel=False"),
    *("Distributed.mp_degree=1", "Distributed.pp_degree=1"),
    *("Global.global_batch_size=32", "Global.local_batch_size=32", "Global.micro_batch_size=1"),
]


@pytest.fixture(scope="module")
def job():
    return job_of(load_config(BIG, SHORT, world_size=1), CLUSTER.card)


def test_zero_bubble_is_tried_where_stages_are_whole(job):
    """It wins where there are few micro batches and no layers left for virtual stages."""
    found = search(job, CLUSTER, 16, keep=40)
    best = found.best[0]
    assert best.job.plan.pp == 16 and best.job.plan.pp_schedule == "zb_h1"
    assert ",zb=1," in plan_text(best.job)
    twin = Prediction(replace(best.job, plan=replace(best.job.plan, pp_schedule="1f1b")), CLUSTER)
    assert best.time.seconds < 0.9 * twin.time.seconds and best.time.bubble < twin.time.bubble
    assert best.fullest >= twin.fullest and best.fits
    orders = {(p.job.plan.virtual_pp_degree > 1, p.job.plan.pp_schedule) for p in found.best}
    assert (False, "zb_h1") in orders and (True, "zb_h1") not in orders and (True, "1f1b") in orders
    least = search(job, CLUSTER, 16, goal="memory").best
    assert {prediction.job.plan.pp_schedule for prediction in least} == {"1f1b"}


def test_a_found_zero_bubble_is_written_as_a_configuration(job):
    best = search(job, CLUSTER, 16, keep=1).best[0].job
    cfg = read_unresolved(BIG, SHORT).under(
        best.plan, best.micro_batch, best.global_batch, best.recomputed[0]
    )
    assert (cfg.Distributed.pp_schedule, cfg.Distributed.pp_degree) == ("zb_h1", 16)
