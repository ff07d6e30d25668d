"""The command's contract: one plan, a ranking, a file that trains, questions about the whole run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ppfleetx.commands.train_verbs import Plan
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.planner.calibration import calibrate
from ppfleetx.planner.cards import load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import job_of
from ppfleetx.planner.plan_to_config import plan_text, read_unresolved
from ppfleetx.planner.prediction import Prediction, run_length, run_prediction
from ppfleetx.planner.run_cost import failures
from ppfleetx.planner.search import search
from ppfleetx.planner.step_time import step_time

BIG = "ppfleetx/configs/nlp/gpt/pretrain_gpt_175B_mp8_pp16.yaml"
NANO = "ppfleetx/configs/debug/gpt_nano.yaml"
SMALL = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"
WORDS = "dp=4,mp=8,pp=12,sharding=1,stage=1,vpp=1,micro=2"


def planned(capsys, *arguments, config=SMALL):
    Plan.parse(["-c", config, *arguments]).run()
    return capsys.readouterr().out


def test_the_object_of_one_plan(capsys):
    common = ("--card", "A100-80GB", "--per-node", "8", "--plan", WORDS, "--json")
    found = json.loads(planned(capsys, "--network-gbps", "800", *common, config=BIG))
    assert found["step_time_s"][0] > 0 and found["step_time_s"] == sorted(found["step_time_s"])
    assert found["plan"].startswith("dp=4,mp=8,pp=12")
    assert len(found["memory_gib"]) == 12
    assert found["parameters"] == 174_603_264_000
    assert found["fits"] is (max(found["memory_gib"]) <= 79.2)
    flops = found["tflops_per_device"]
    assert flops["causal_attention"] < flops["full_attention"] <= flops["with_recompute"]
    assert found["mfu"] == pytest.approx(flops["full_attention"] / 312, rel=1e-4)
    assert 0 < found["bubble"] < 1
    assert 0 < found["exposed_comm_s"] < found["step_time_s"][1]
    slower = json.loads(planned(capsys, "--network-gbps", "100", *common, config=BIG))
    assert slower["step_time_s"][1] > found["step_time_s"][1]
    assert slower["constants"]["name"] == "A100-80GB"


def test_a_plan_counts_where_the_files_own_does_not_divide(capsys):
    """40 layers do not divide by the file's 16 stages; the plan has 8."""
    sizes = ("-o", "Model.num_layers=40", "-o", "Model.hidden_size=6144")
    words = "dp=2,mp=8,pp=8,micro=1,vpp=1"
    found = json.loads(planned(capsys, *sizes, "--plan", words, "--json", config=BIG))
    assert found["devices"] == 128
    with pytest.raises(ConfigError, match="40 layers do not divide into pp_degree 16"):
        planned(capsys, *sizes, "--json", config=BIG)


def test_what_is_written_trains_under_the_plan(capsys, tmp_path):
    path = tmp_path / "out.yaml"
    words = "dp=2,mp=2,pp=2,sharding=2,stage=2,micro=2,recompute=full,sp=1"
    planned(capsys, "--plan", words, "--batch", "64", "--write", str(path))
    cfg = load_config(path)
    assert str(cfg.plan) == "dp 2, mp 2, pp 2, sharding 2 (stage 2), sequence parallel"
    assert (cfg.batch.global_batch_size, cfg.batch.micro_batch_size) == (64, 2)
    assert cfg.Model.use_recompute and cfg.Model.recompute_granularity == "full"
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        planned(capsys, "--plan", words, "--write", str(path))


def test_the_best_is_written_and_its_rivals_are_explained(capsys, tmp_path):
    path = tmp_path / "best.yaml"
    text = planned(capsys, "--devices", "8", "--write", str(path), "--card", "A100-80GB")
    assert load_config(path).plan.world_size == 8
    reasons = text.split("Why not\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert len(reasons) >= 4
    assert any("Data parallelism alone" in reason for reason in reasons)
    assert all(reason.endswith(".") for reason in reasons)
    assert "days and" in text
    assert "Constants of A100-80GB" in text


def test_plans_are_ranked(capsys):
    found = json.loads(planned(capsys, "--devices", "8", "--json"))
    times = [plan["step_time_s"][2] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["candidates"] == found["fit"] + found["unfit"] + found["slower"]
    assert 0 < found["fit"] <= found["candidates"] and 0 <= found["too_large"] < found["legal"]
    assert len(times) == 10
    assert all(plan["fits"] and plan["devices"] == 8 for plan in found["plans"])
    text = planned(capsys, "--devices", "8", "--explain")
    assert found["plans"][0]["plan"] in text
    assert "memory by part" in text


@pytest.mark.slow
def test_least_memory_comes_first_where_it_is_the_goal(capsys):
    found = json.loads(planned(capsys, "--devices", "8", "--goal", "memory", "--json"))
    memory = [max(plan["memory_gib"]) for plan in found["plans"]]
    assert memory == sorted(memory)
    fast = json.loads(planned(capsys, "--devices", "8", "--json"))
    assert memory[0] < max(fast["plans"][0]["memory_gib"])


@pytest.mark.slow
def test_offload_is_tried_where_memory_is_short(capsys):
    """13B in float16 on four cards of 40 GB: states alone are more than all of them hold."""
    config = "ppfleetx/configs/nlp/gpt/pretrain_gpt_13B_dp8.yaml"
    asked = ("--devices", "4", "--card", "A100-40GB", "--json")
    plans = json.loads(planned(capsys, *asked, config=config))["plans"]
    assert plans and all("offload=1" in plan["plan"] and plan["host_memory_gib"] > 30 for plan in plans)
    text = planned(capsys, *asked[:-1], config=config).splitlines()
    column = next(line for line in text if "host GiB" in line).split("  plan")[0].index("host GiB")
    shown = [float(line[column : column + len("host GiB")]) for line in text if "offload=1" in line][:10]
    assert shown == [round(plan["host_memory_gib"], 1) for plan in plans]
    without = plans[0]["plan"].replace("offload=1", "offload=0").replace("recompute=none", "recompute=full")
    assert not json.loads(planned(capsys, *asked[2:], "--plan", without, config=config))["fits"]
    roomy = json.loads(planned(capsys, "--devices", "8", "--card", "A100-80GB", "--json"))["plans"]
    assert not any("offload=1" in plan["plan"] for plan in roomy)


def test_no_number_of_cards_is_too_odd_to_be_answered(capsys):
    assert json.loads(planned(capsys, "--devices", "7", "--json"))["plans"] == []
    text = planned(capsys, "--devices", "7")
    assert "take another number of them (6 can be used), or another batch (--batch 63 divides)" in text
    assert json.loads(planned(capsys, "--devices", "7", "--batch", "63", "--json"))["plans"]


def test_an_explained_plan_is_the_one_named(capsys):
    text = planned(capsys, "--explain", "dp=4,micro=4")
    assert "dp=4,mp=1" in text and "memory by part" in text
    with pytest.raises(ConfigError, match="--plan does too"):
        planned(capsys, "--explain", "dp=4", "--plan", "dp=4")


def test_the_margin_of_memory_for_busy_experts_is_named(capsys):
    words = ("--plan", "dp=2,ep=2", "--explain")
    said = planned(capsys, *words, config="ppfleetx/configs/debug/gpt_moe_nano.yaml")
    (line,) = [line for line in said.splitlines() if line.startswith("experts ")]
    assert "1.5 times the mean" in line and "2 times" in line  # the margin, and all rows on one rank


def test_the_best_interval_is_where_least_is_lost():
    """Young's formula is the first order of Daly's; nearby intervals lose more."""
    prediction = run_prediction(load_config(BIG), "gpu")
    save, mtbf = 60.0, 50 * 3600 * 16
    found = failures(prediction, node_mtbf=mtbf, save=save, restart=300.0)
    assert found.mtbf == mtbf / 16
    assert found.interval == pytest.approx(math.sqrt(2 * save * found.mtbf), rel=0.05)
    cost = {f: save / (f * found.interval) + f * found.interval / (2 * found.mtbf) for f in (0.8, 1.0, 1.25)}
    assert min(cost, key=lambda factor: cost[factor]) == 1.0


def test_days_and_cost_follow_from_the_step(capsys):
    prediction = run_prediction(load_config(BIG), "gpu")
    run = run_length(prediction, 3e11)
    assert run.days == pytest.approx(3e11 / prediction.tokens_per_second / 86_400)
    assert run.card_hours == pytest.approx(run.days * 24 * 128)
    assert run.cost(2.0)[0] == pytest.approx(2 * run.card_hours)
    text = planned(
        capsys,
        "--plan",
        "dp=8,micro=1",
        "--price",
        "2",
        "--mtbf",
        "1000",
        "--scale",
        "8,16,24",
        "--ramp",
        "32,8,800",
    )
    for words in ("a million tokens", "The job fails every", "The ramp's 800 sequences", "cannot be split"):
        assert words in text


def test_other_numbers_of_cards_say_why_they_do_not_serve(capsys):
    """A replica is 4 cards, and its micro batches must be a multiple of the 4 stages."""
    words = ("--plan", "dp=2,pp=4,vpp=2,micro=1", "--batch", "96", "--scale", "8,32,36,68,384")
    lines = planned(capsys, *words).splitlines()
    said = {line.split()[0]: line for line in lines if line.strip()}
    assert "%" in said["8"] and "%" in said["32"]
    assert "cannot be split among 9 data ranks" in said["36"]
    assert "cannot be split among 17 data ranks" in said["68"]
    assert "multiple of pp_degree 4" in said["384"]
    assert "not a multiple of the 4 cards of a replica" in planned(capsys, *words[:-1], "6")


def test_a_ramp_is_refused_with_virtual_stages_as_in_training(capsys):
    with pytest.raises(ConfigError, match="virtual-stage schedule"):
        planned(capsys, "--plan", "dp=2,pp=4,vpp=2,micro=1", "--batch", "96", "--ramp", "12,12,1000")


def test_what_is_written_names_the_card_that_it_was_planned_for(capsys, tmp_path):
    """The file's own card is a V100-32GB."""
    (tmp_path / "mine.yaml").write_text("base: H100-80GB\nmemory_gib: 70\n")
    for card in ("H100-80GB", str(tmp_path / "mine.yaml")):
        path = tmp_path / f"plan_{Path(card).stem}.yaml"
        planned(capsys, "--devices", "128", "--card", card, "--write", str(path), config=BIG)
        assert load_config(path).Global.card == card
    path = tmp_path / "own.yaml"
    planned(capsys, "--plan", "dp=1", "--write", str(path), config=BIG)
    assert load_config(path).Global.card == "V100-32GB"


def test_the_type_of_products_is_said(capsys):
    """With mix_precision.enable auto, a card without bfloat16 computes in float32."""
    bfloat16 = ("-o", "Engine.mix_precision.dtype=bfloat16")
    for card, words in (("V100-32GB", "float32"), ("A100-80GB", "bfloat16")):
        text = planned(capsys, *bfloat16, "--card", card, "--devices", "8", "--explain")
        assert f"All plans compute in {words}." in text and f"computed in {words}" in text


def test_without_a_plan_nothing_is_written(capsys, tmp_path):
    for option in ("--write", "--report"):
        with pytest.raises(ConfigError, match="nothing to write"):
            planned(capsys, "--devices", "7", option, str(tmp_path / "plan.yaml"))
    assert not list(tmp_path.iterdir())


def test_the_fullest_stage_can_be_in_the_middle(capsys):
    """Layers of the second stage alone keep their activations."""
    recompute = (
        "-o",
        "Model.use_recompute=True",
        "-o",
        "Model.recompute_granularity=full",
        "-o",
        "Model.no_recompute_layers=[6,7,8,9,10,11]",
    )
    found = json.loads(planned(capsys, *recompute, "--plan", "dp=2,pp=4,micro=8", "--json"))
    fullest = max(found["memory_gib"])
    assert found["memory_gib"][1] == fullest
    text = planned(capsys, *recompute, "--plan", "dp=2,pp=4,micro=8")
    assert f"fullest rank {fullest:.1f} GiB" in text


def test_no_part_of_memory_or_time_is_negative(capsys):
    """Messages of slow networks count once for each stage that waits; late peaks have no activations."""
    slow = ("--plan", "dp=1,pp=2,micro=1", "--network-gbps", "1", "--per-node", "1", "--json")
    found = json.loads(planned(capsys, *slow))
    assert min(found["step_parts_s"].values()) >= 0
    parts = {name: value for name, value in found["step_parts_s"].items() if name != "recompute"}
    assert sum(parts.values()) == pytest.approx(found["step_time_s"][1], rel=1e-4)
    late = json.loads(planned(capsys, "--plan", "dp=1,sharding=64,micro=1", "--json"))
    assert min(late["memory_parts_gib"][0].values()) >= 0
    assert sum(late["memory_parts_gib"][0].values()) == pytest.approx(late["memory_gib"][0], abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ramp", "32,8"), "takes three numbers"),
        (("--ramp", "33,8,100"), "not 33"),
        (("--scale", "8,x"), "integers of at least 1"),
        (("--price", "-1"), "greater than 0"),
        (("--tokens", "nan"), "greater than 0"),
        (("--calibrate", "nowhere"), "output directory of a run"),
        (("--write-card", "x.yaml"), "needs --calibrate"),
        (("--rank-order", "pp,dp"), "each of dp, pp, sharding, sep, mp once"),
        (("--plan", "stage=4"), "must be 1, 2 or 3"),
        (("--plan", "dp=3"), "cannot be split"),
        (("--plan", "mp=3,dp=1"), "must divide by mp_degree"),
        (("--plan", "dq=3"), "must be dp, mp"),
        (("--plan", "dp=1,dp=1"), "names dp twice"),
        (("--plan", "dp=0"), "at least 1"),
        (("--plan", "recompute=some"), "recompute is one of"),
        (("--plan", "dp=8", "--devices", "4"), "uses 8 cards, not 4"),
        (("--card", "A1000"), "no such card"),
    ],
)
def test_questions_that_cannot_be_answered(capsys, arguments, words):
    plan = () if arguments[0] == "--plan" else ("--plan", "dp=8")
    with pytest.raises(ConfigError, match=words):
        planned(capsys, *arguments, *plan)


def recorded(directory, *records, **settings):
    """The output directory of a run with these records of steps."""
    directory.mkdir(exist_ok=True)
    settings = {"_base_": str(Path(NANO).resolve()), **settings}
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = (json.dumps({"kind": "train", **record}) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text("".join(lines))
    return str(directory)


@pytest.mark.slow
def test_calibration_finds_the_card_that_made_the_times(tmp_path):
    """Runs of two plans on a card that is half as fast, with slow links."""
    card = load_card("CPU")
    slow = card.model_copy(
        update={"matmul_efficiency": 0.3, "memory_efficiency": 0.25, "link_gb_s": {2: 0.1}, "name": "slow"}
    )
    directories = []
    for number, plan in enumerate(([], ["Distributed.mp_degree=2"])):
        seconds = step_time(job_of(load_config(NANO, plan), slow), Cluster(slow)).seconds
        records = [{"batch_cost": seconds + 0.5, "reader_cost": 0.5}] * 5
        distributed = {"mp_degree": 1 + number}
        directories.append(recorded(tmp_path / f"run{number}", *records, Distributed=distributed))
    fitted, told = calibrate(directories, Cluster(card), str(tmp_path / "mine.yaml"))
    assert "before" in told
    again = load_card(str(tmp_path / "mine.yaml"))
    assert again.link_gb_s == fitted.link_gb_s
    assert fitted.network_latency_us == card.network_latency_us, "no run used the network"
    for plan in ([], ["Distributed.mp_degree=2"]):
        job = job_of(load_config(NANO, plan), slow)
        true = step_time(job, Cluster(slow)).seconds
        assert Prediction(job, Cluster(fitted)).time.seconds == pytest.approx(true, rel=0.05)


def test_json_says_what_calibration_found(capsys, tmp_path):
    directory = recorded(tmp_path, *[{"batch_cost": 0.5}] * 5)
    run = ("--card", "CPU", "--plan", "dp=1", "--calibrate", directory, "--json")
    found = json.loads(planned(capsys, *run, config=NANO))
    assert "measured 0.5 s" in found["calibration"][1]
    with pytest.raises(ConfigError, match=r"--write-card = .*its directory does not exist"):
        planned(capsys, *run, "--write-card", str(tmp_path / "config.yaml/x"), config=NANO)
    assert "after" in found["calibration"][1]
    for total, parts in zip(found["memory_gib"], found["memory_parts_gib"], strict=True):
        assert sum(parts.values()) == pytest.approx(total, abs=1e-3)


def test_calibration_leaves_out_the_first_two_steps_and_not_the_first_two_records(tmp_path):
    def told(num_steps: int, *times: float) -> str:
        records = ({"num_steps": num_steps, "batch_cost": time} for time in times)
        return calibrate([recorded(tmp_path, *records)], Cluster(load_card("CPU")), None)[1]

    assert "measured 0.5 s" in told(1, 9.0, 9.0, 0.5)
    assert "measured 0.5 s" in told(10, 9.0, 0.5)
    for num_steps, times in ((1, (9.0, 9.0)), (10, (9.0,))):
        with pytest.raises(ConfigError, match=r"no usable record .* after the first 2 steps"):
            told(num_steps, *times)


def test_rank_order_decides_who_shares_a_node(capsys):
    """Stages that lie next to each other send within the node, and replicas over the network."""
    words = ("--per-node", "2", "--plan", "dp=2,pp=2,micro=1", "--json")
    times = {}
    for order in ("dp,pp,sharding,sep,mp", "pp,dp,sharding,sep,mp"):
        times[order] = json.loads(planned(capsys, *words, "--rank-order", order))["step_parts_s"]
    own, other = times.values()
    assert own["pipeline"] < other["pipeline"]
    assert own["gradients"] > other["gradients"]


def test_the_report_is_whole_and_opens_without_a_network(capsys, tmp_path):
    directory = tmp_path / "report"
    words = "dp=1,mp=2,pp=2,sharding=2,vpp=2,micro=2,recompute=full"
    planned(capsys, "--plan", words, "--report", str(directory))
    names = {path.name for path in directory.iterdir()}
    drawn = {f"{name}.{ending}" for name in ("timeline", "memory", "step") for ending in ("png", "svg")}
    assert names == {*drawn, "index.html"}
    page = (directory / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 3
    assert 'src="http' not in page and "href=" not in page
    svg = (directory / "timeline.svg").read_text(encoding="utf-8")
    assert "recomputed" in svg and "idle" in svg
    with pytest.raises(ConfigError, match="report already"):
        planned(capsys, "--plan", words, "--report", str(directory))


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
