"""Parts of the planner against numbers worked out by hand."""

from dataclasses import replace

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.mesh import SMALL_MESSAGE
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.rules import expert_message_bytes
from ppfleetx.config.sections.compress import CompressConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import flops_per_step, parameter_count
from ppfleetx.planner import shipped_cards
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.communication import (
    Cluster,
    all_reduce_seconds,
    all_to_all_seconds,
    expert_all_to_all_seconds,
    group_of,
)
from ppfleetx.planner.job import EXPERT_IMBALANCE, Job, Overlap, Precision, job_of, uses_flash
from ppfleetx.planner.memory import kept_gradients, stage_memory
from ppfleetx.planner.mfu import step_flops
from ppfleetx.planner.parameters import held_parameters
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.search import search
from ppfleetx.planner.timeline import Messages, simulate
from tests.planner.traffic import sent_bytes

H, LAYERS, VOCAB, LENGTH = 64, 4, 512, 32
CONFIG = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"


def small_job(plan=ParallelPlan(), recompute="none", **model):  # noqa: B008
    sizes = {"vocab_size": VOCAB, "hidden_size": H, "num_layers": LAYERS, "num_attention_heads": 4, **model}
    shape = ModelConfig(max_position_embeddings=LENGTH, softmax_in_fp32=False, **sizes)
    precision = Precision("bfloat16", lowers_parameters=True)
    return Job(shape, plan, 2, 4, LENGTH, precision, (recompute,) * LAYERS)


def test_a_layer_keeps_what_the_formula_says():
    """34 s b h + 5 a s^2 b bytes (Korthikanti et al. 2022, equation 1)."""
    published = replace(small_job(), kernels="fused")
    block, work = published.spec.blocks[0], published.work
    assert block.tape(work, "none").kept == 34 * LENGTH * 2 * H + 5 * 4 * LENGTH**2 * 2
    assert block.tape(work, "core_attn").kept == 34 * LENGTH * 2 * H
    assert block.tape(work, "full").kept == 2 * LENGTH * 2 * H


MOE = {"moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 32, "first_dense_layers": 1}}


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=2),
        ParallelPlan(mp=2, dp=2, ep=2),
        ParallelPlan(mp=2, dp=2, ep=4, expert_mp=1),
        ParallelPlan(sharding=4, ep=2),
    ],
    ids=str,
)
def test_ranks_hold_their_slices_of_experts(plan):
    one, held = (held_parameters(small_job(each, **MOE), 0) for each in (ParallelPlan(), plan))
    each = 2 * H * 32 + 32 + H
    assert one.experts == 3 * 8 * each
    bias = 3 * 8 * H // plan.ep * (1 - 1 / plan.emp)  # the last bias is whole where matrices are sliced
    assert held.experts == one.experts / (plan.ep * plan.emp) + bias
    assert (
        held.owned == held.trained if plan.sharding == 1 else held.owned < held.dense / 3 + held.experts / 2
    )


def test_experts_exchange_rows_and_need_memory_for_more_than_the_mean():
    cluster = Cluster(load_card("A100-80GB"), per_node=2)
    inside, outside = (
        Prediction(small_job(plan, **MOE), cluster)
        for plan in (
            ParallelPlan(dp=2, sharding=2, ep=2),
            ParallelPlan(dp=2, mp=2, ep=2, sequence_parallel=True),
        )
    )
    assert 0 < inside.time.parts["expert_parallel"] < outside.time.parts["expert_parallel"]
    assert Prediction(small_job(ParallelPlan(dp=2), **MOE), cluster).time.parts["expert_parallel"] == 0
    mixture = small_job(ParallelPlan(dp=2, ep=2), **MOE)
    mlp, work = mixture.spec.blocks[1].mlp, mixture.work
    assert mlp.sent_bytes(work) == 2 * 2 * LENGTH * H * 2  # two rows for each of the positions, in 16 bits
    worst, mean = (
        sum(step.size for step in mlp.tape(each, "out", "in"))
        for each in (work, replace(work, imbalance=1.0))
    )
    assert work.imbalance == EXPERT_IMBALANCE and worst > mean


def test_small_messages_between_experts_travel_on_two_levels():
    """On 4 nodes of 8 cards: 3 messages between nodes, not 24, and the bytes once more within a node."""
    card = load_card("A100-80GB")
    cluster, plan = Cluster(card), ParallelPlan(sharding=32, ep=32)
    group = group_of(plan, "ep", cluster)
    for size, levels in ((32 * 1e5, 2), (32 * 3e6, 1)):
        flat, chosen = (way(size, group, cluster) for way in (all_to_all_seconds, expert_all_to_all_seconds))
        assert chosen == all_to_all_seconds(size, group, cluster, levels=levels) <= flat
    saved = all_to_all_seconds(32, group, cluster) - all_to_all_seconds(32, group, cluster, levels=2)
    assert saved == pytest.approx((21 * card.network_latency_us - card.kernel_latency_us) * 1e-6, rel=1e-3)
    of_node = group_of(ParallelPlan(sharding=8, ep=8), "ep", cluster)
    assert expert_all_to_all_seconds(1e3, of_node, cluster) == all_to_all_seconds(1e3, of_node, cluster)


def test_the_engine_and_the_planner_know_the_same_messages():
    cfg = load_config("ppfleetx/configs/nlp/moe/pretrain_deepseek_v3_ep64_pp16.yaml", world_size=2048)
    job = job_of(cfg, load_card("H100-80GB"))
    sent = next(block.mlp for block in job.spec.blocks[::-1]).sent_bytes(job.work)
    assert expert_message_bytes(cfg) == sent / 64 > SMALL_MESSAGE


def test_a_search_divides_experts():
    job = replace(small_job(**MOE), precision=Precision(), kernels="cpu", micro_batch=8, accumulate=1)
    plans = [p.job.plan for p in search(job, Cluster(load_card("CPU"), per_node=4), 4, keep=1000).best]
    assert {plan.ep for plan in plans} == {1, 2, 4}
    assert any(plan.emp == 1 < plan.mp for plan in plans)


def test_a_search_leaves_out_what_the_engine_refuses_under_muon():
    job = replace(small_job(hidden_size=256), micro_batch=8, accumulate=1)
    card = load_card("A100-80GB").model_copy(update={"memory_gib": 0.42, "context_gib": 0.4})

    def offloaded(needs_whole_matrices: bool) -> set[int]:
        best = search(
            replace(job, needs_whole_matrices=needs_whole_matrices), Cluster(card), 4, keep=1000
        ).best
        return {found.job.plan.mp for found in best if found.job.plan.sharding_offload}

    assert offloaded(needs_whole_matrices=False) == {1, 2}
    assert offloaded(needs_whole_matrices=True) == {1}


def test_operations_follow_the_papers():
    batch = 8
    full = 72 * batch * LAYERS * LENGTH * H**2 * (1 + LENGTH / (6 * H) + VOCAB / (12 * H * LAYERS))
    assert step_flops(small_job()).full == full
    assert step_flops(small_job()).causal == flops_per_step(small_job().model, batch, LENGTH)
    again = 96 * batch * LAYERS * LENGTH * H**2 * (1 + LENGTH / (6 * H) + VOCAB / (16 * H * LAYERS))
    assert step_flops(small_job(recompute="full")).hardware == again


@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_the_whole_model(tied):
    one = held_parameters(small_job(tie_word_embeddings=tied), 0)
    assert one.used == one.owned == parameter_count(small_job(tie_word_embeddings=tied).model)
    two = [
        held_parameters(small_job(ParallelPlan(pp=2), tie_word_embeddings=tied), stage) for stage in (0, 1)
    ]
    copies = VOCAB * H if tied else 0
    assert sum(held.used for held in two) == one.used + copies


def test_frozen_small_weights_take_their_own_bytes():
    """Adapters on weights of 4 bits: codes and scales as they are stored, the rest in the model's type."""
    plain = small_job(lora={"rank": 4})
    small = replace(plain, compress=CompressConfig(Weights={"bits": 4, "group_size": 16}))
    before, after = (held_parameters(one, 0) for one in (plain, small))
    matrices = LAYERS * 12 * H**2
    scales = matrices // 16 + VOCAB
    assert after.stored == matrices // 2 + VOCAB * H + 4 * scales and before.stored == 0
    assert before.used - after.used == matrices + VOCAB * H
    assert after.trained == before.trained == LAYERS * 4 * 16 * H
    memory, other = (stage_memory(one, Cluster(load_card("A100-80GB")), 0) for one in (plain, small))
    assert other.parameters == 2 * after.used + after.stored < memory.parameters


def test_sharding_divides_states():
    held = held_parameters(small_job(ParallelPlan(sharding=2)), 0)
    assert held.used == parameter_count(small_job().model)
    assert held.used / 2 <= held.owned < held.used * 0.6


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_experts_stay_until_the_end_of_a_step(stage):
    """Stages 2 and 3 send those of dense weights in each pass, when a bucket is full."""
    plan = ParallelPlan(sharding=4, sharding_stage=stage, ep=2)
    overlap = Overlap(bucket_bytes=1024.0)
    job = replace(small_job(plan, **MOE), overlap=overlap)
    held = held_parameters(job, 0)
    assert 0 < held.owned_experts < held.experts * 0.6
    waiting = 3 * 1024 // job.precision.gradient_bytes
    dense = held.owned - held.owned_experts + waiting
    assert dense < held.dense
    assert kept_gradients(job, held) == (held.experts + dense) * job.precision.gradient_bytes


def test_an_empty_pipeline_has_the_bubble_of_the_textbook():
    """(p - 1) / m more than the passes, with equal stages and no messages (Narayanan et al. 2021, §2.2.1)."""
    forward, backward = [[1.0]] * 4, [[2.0]] * 4
    assert simulate(forward, backward, 8, Messages(0.0)).seconds == pytest.approx((8 + 3) * 3.0)
    halves = simulate([[0.5, 0.5]] * 4, [[1.0, 1.0]] * 4, 8, Messages(0.0)).seconds
    assert halves == pytest.approx((8 + 3 / 2) * 3.0)


def test_gradients_of_weights_fill_the_bubble():
    """(p - 1)(F + B - W) remains (Qi et al. 2023, table 2), B the backward pass without W, for any times."""
    for forward, inputs, weights in ((1.0, 1.0, 1.0), (1.0, 1.3, 0.9)):
        times = [[forward]] * 4, [[inputs + weights]] * 4, 8, Messages(0.0)
        played = simulate(*times, weights=[weights] * 4)
        busy = 8 * (forward + inputs + weights)
        assert played.seconds == pytest.approx(busy + 3 * (forward + inputs - weights), rel=0.01)
        assert sum(span.is_weights for span in played.spans) == 4 * 8
        long = simulate(times[0], times[1], 64, Messages(0.0), weights=[weights] * 4).seconds
        assert long == pytest.approx(busy * 8 + 3 * (forward + inputs - weights), rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_zero_bubble_sends_whole_activations_where_each_tensor_rank_holds_them(sequence_parallel):
    plain = small_job(ParallelPlan(mp=4, pp=2, sequence_parallel=sequence_parallel))
    divided = replace(plain, plan=replace(plain.plan, pp_schedule="zb_h1"))
    plain_bytes, bytes_ = sent_bytes(plain, 0), sent_bytes(divided, 0)
    assert bytes_["pp"] == pytest.approx(plain_bytes["pp"] * (1 if sequence_parallel else 4))
    gathered = plain.accumulate * plain.hidden_bytes * 3 / 4  # gradients that come back in four parts
    assert plain_bytes["mp"] - bytes_["mp"] == pytest.approx(0 if sequence_parallel else gathered)


def test_messages_that_travel_while_stages_compute():
    """1F1B has as many micro batches under way as stages, so that going round takes
    p (F + B) + 2 (p - 1) m; where the sender waits, a stage spends F + B + 2 m on each."""
    times = [[1.0]] * 4, [[2.0]] * 4

    def four_more(seconds: float, *, waits: bool) -> float:
        messages = Messages(seconds, output_waits=waits, gradient_waits=waits)
        return simulate(*times, 68, messages).seconds - simulate(*times, 64, messages).seconds

    assert four_more(0.25, waits=False) == pytest.approx(4 * 3.0 + 2 * 3 * 0.25)
    assert four_more(0.25, waits=True) == pytest.approx(4 * (3.0 + 2 * 0.25))
    assert four_more(5.0, waits=False) >= 4 * 5.0, "one message at a time in each direction"


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_long_step_is_not_played_to_its_end_and_takes_as_long(chunks):
    forward = [[(1.0 + 0.1 * stage) / chunks] * chunks for stage in range(4)]
    backward = [[2.0 / chunks] * chunks for _ in range(4)]
    whole = simulate(forward, backward, 64, Messages(0.1), whole=True).seconds
    assert simulate(forward, backward, 64, Messages(0.1)).seconds == pytest.approx(whole, rel=1e-9)


def test_a_ring_moves_its_bytes_twice():
    card = load_card("A100-80GB")
    group = group_of(ParallelPlan(mp=8), "mp", Cluster(card))
    seconds = all_reduce_seconds(1e9, group, Cluster(card))
    assert seconds == pytest.approx(2 * 7 / 8 * 1e9 / card.link_bandwidth(8), rel=0.05)


def test_a_group_that_lies_on_two_nodes_is_as_slow_as_their_network():
    """Of 24 ranks in groups of 6, ranks 6 to 11 are on two nodes of 8 cards; 6 ranks alone are on one."""
    card = load_card("A100-80GB")
    split, whole = (group_of(ParallelPlan(dp=dp, mp=6), "mp", Cluster(card)) for dp in (4, 1))
    assert split.leaves_node and not whole.leaves_node
    assert (split.inside, split.sharing) == (3, 2)
    filled = group_of(ParallelPlan(dp=4, mp=6), "mp", Cluster(card, per_node=12))
    assert not filled.leaves_node and filled.sharing == 2


@pytest.mark.parametrize("name", list(shipped_cards()))
def test_shipped_cards_are_whole(name):
    card = load_card(name)
    assert card.memory_gib > 10
    assert card.kernels == "cpu" or card.peak("float16") > card.peak("float32")


def test_a_card_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mine:\n  base: A100-80GB\n  memory_gib: 60\n")
    assert load_card(str(path)).memory_gib == 60
    path.write_text("base: A100-80GB\nmemory_gib: 60\n")
    assert (load_card(str(path)).memory_gib, load_card(str(path)).name) == (60, "mine")
    path.write_text("mine:\n  base: A100-80GB\n  memory_gob: 60\n")
    with pytest.raises(ConfigError, match="memory_gob"):
        load_card(str(path))
    with pytest.raises(ConfigError, match=r"did you mean 910B-64GB\?"):
        load_card("910B")
    with pytest.raises(ConfigError, match=r"did you mean A100-80GB or A100-40GB\?"):
        load_card("a100")
    with pytest.raises(ConfigError, match="did you mean A100-80GB"):
        load_card("A100-80")


def test_states_of_each_optimizer():
    card, found = load_card("A100-80GB"), {}
    for name in ("AdamW", "Muon", "SGD"):
        cfg = load_config(CONFIG, [f"Optimizer.name={name}"], world_size=8)
        found[name] = job_of(cfg, card).moments
    assert found["AdamW"] == 2 and found["SGD"] == 0
    assert 1 < found["Muon"] < 2  # one for the matrices of the blocks, two for the rest


@pytest.mark.parametrize(("stage", "offload"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_no_start_takes_more_than_a_step(stage, offload):
    """Of 1.3 billion parameters; before, a start took 6 bytes of each on every rank."""
    card = load_card("A100-80GB")
    given = job_of(load_config(CONFIG, world_size=8), card)
    least = replace(given, micro_batch=1, recomputed=("full",) * len(given.recomputed))
    for sharding, pp in ((2, 1), (8, 1), (64, 1), (4, 4), (16, 8)):
        plan = ParallelPlan(sharding=sharding, sharding_stage=stage, pp=pp, sharding_offload=offload)
        for memory in Prediction(replace(least, plan=plan), Cluster(card)).memory:
            assert memory.start < memory.total


def test_a_plan_has_to_fit_at_its_start_too(monkeypatch):
    """Of a step and of the start, whichever needs more."""
    small = small_job(ParallelPlan(sharding=4, sharding_stage=3))
    before = Prediction(small, Cluster(load_card("V100-16GB")))
    held = held_parameters(small, 0)
    assert before.fits and before.memory[0].peak == before.memory[0].total > before.memory[0].start
    kept = 2 * held.resident + 4 * held.owned
    assert before.memory[0].start == before.memory[0].context + 1.02 * max(kept, 4 * held.largest_layer)
    monkeypatch.setattr("ppfleetx.planner.memory._start", lambda *_: 17.0 * 2**30)
    after = Prediction(small, Cluster(load_card("V100-16GB")))
    assert not after.fits and after.fullest == after.memory[0].start


def test_ascend_cards_say_what_is_a_guess_and_have_no_fused_attention():
    """A node of 16 dies of the 910C has links that do not block; a 910B has one link to each neighbour."""
    for name in ("910B-64GB", "910C-64GB"):
        card = load_card(name)
        assert any("Guess" in source for source in card.sources)
        assert not uses_flash(small_job().model, Precision("bfloat16", lowers_parameters=True), card)
    pair, eight = load_card("910B-64GB").link_bandwidth(2), load_card("910B-64GB").link_bandwidth(8)
    assert eight == 7 * pair
    assert load_card("910C-64GB").link_bandwidth(2) == load_card("910C-64GB").link_bandwidth(16) == eight


def test_kernels_without_scores_have_no_soft_limit_of_scores_and_on_a_cpu_no_dropout():
    model = small_job(attention_probs_dropout_prob=0.0).model
    capped, drops = (
        model.model_copy(update=change)
        for change in ({"attn_logit_softcapping": 30.0}, {"attention_probs_dropout_prob": 0.1})
    )
    gpu = Precision("bfloat16", lowers_parameters=True), load_card("A100-80GB")
    cpu = Precision(rounds_matmuls=True), load_card("CPU")
    assert [uses_flash(one, *gpu) for one in (model, capped, drops)] == [True, False, True]
    assert [uses_flash(one, *cpu) for one in (model, capped, drops)] == [True, False, False]
    assert not uses_flash(model, Precision(), cpu[1])


def test_the_tensor_parallel_loss_of_a_plugins_device_takes_three_more_copies_of_the_logits():
    """Paddle composes it there."""
    plan = ParallelPlan(mp=2)
    wide = small_job(plan, vocab_size=65_536)
    logits = wide.micro_batch * wide.seq_len * 65_536 / plan.mp * 4
    cluster = Cluster(load_card("A100-80GB"))
    taken = [stage_memory(replace(wide, kernels=kind), cluster, 0).tensors for kind in ("gpu", "plugin")]
    assert 2 * logits < taken[1] - taken[0] <= 3 * logits


@pytest.mark.parametrize(("width", "measured"), [(1024, 99.9), (2048, 248.3), (4096, 315.4)])
def test_products_of_a_910b_are_those_that_users_measured(width, measured):
    card, flops = load_card("910B-64GB"), 2.0 * width**3
    assert flops / card.matmul_seconds(flops, "bfloat16", width) / 1e12 == pytest.approx(measured, rel=0.02)
