"""Plans that cannot be are refused with the rule they break and the nearest legal plan."""

import json

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.config.registries import OPTIMIZERS, OptimizerTraits
from ppfleetx.data.build import build_dataset
from tests.config.conftest import refusal

FILE = "ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml"
D, M = "Distributed", "Model"
SEQ_1023 = "Data.Train.dataset.max_seq_len=1023"
ONE_BY_ONE = "Global.micro_batch_size=1"

# (processes, overrides, words of the rule, degrees of the plan that is named)
IMPOSSIBLE = [
    (4, f"{D}.dp_degree=3", "4 processes were started", "dp 4"),
    (8, f"{D}.dp_degree=null {D}.mp_degree=3", "a multiple of 3", "mp 4"),
    (8, f"{D}.dp_degree=null {D}.mp_degree=16", "a multiple of 16", "mp 8"),
    (8, f"{D}.dp_degree=null {D}.mp_degree=8 {D}.pp_degree=2", "a multiple of 16", "mp 4, pp 2"),
    (8, f"{D}.dp_degree=null {D}.mp_degree=4 {D}.pp_degree=4", "a multiple of 16", "mp 2, pp 4"),
    (8, f"{D}.dp_degree=2 {D}.mp_degree=2", "needs 4", "dp 4, mp 2"),
    (8, f"{D}.dp_degree=2 {D}.pp_degree=8", "needs 16", "pp 8"),
    (8, f"{D}.dp_degree=null {D}.sharding.sharding_degree=3", "sharding 3", "sharding 4"),
    (8, f"{D}.dp_degree=1 {D}.sharding.sharding_degree=16", "needs 16", "sharding 8"),
    (8, f"{D}.dp_degree=null {D}.pp_degree=8 {D}.sharding.sharding_degree=2", "multiple of 16", "pp 8"),
    (8, f"{D}.dp_degree=null {D}.sep_degree=3", "a multiple of 3", "sep "),
    (6, f"{D}.dp_degree=null {D}.mp_degree=4", "a multiple of 4", "mp 2"),
    (7, f"{D}.dp_degree=null {D}.mp_degree=7", "attention heads must divide by mp_degree 7", "dp 7"),
    (8, f"{D}.dp_degree=1 {D}.mp_degree=8 {M}.num_attention_heads=4", "4 attention heads", "mp 4"),
    (8, f"{D}.dp_degree=1 {D}.mp_degree=8 {M}.num_query_groups=4", "4 key/value heads", "mp 4"),
    (8, f"{D}.dp_degree=4 {D}.mp_degree=2 {M}.ffn_hidden_size=8191", "MLP width 8191", "dp 8, mp 1"),
    (8, f"{D}.dp_degree=1 {D}.pp_degree=8 {M}.num_layers=12", "12 layers do not divide", "pp 4"),
    (8, f"{D}.dp_degree=2 {D}.pp_degree=4 {M}.virtual_pp_degree=5", "do not divide into pp_degree 4", "pp 4"),
    (8, f"{D}.dp_degree=2 {D}.pp_degree=4 {D}.pp_layers=[6,6,6]", "one number of layers per", "pp 4"),
    (8, f"{D}.dp_degree=2 {D}.pp_degree=4 {D}.pp_layers=[6,6,6,5]", "must add up to num_layers 24", "pp 4"),
    (8, f"{M}.virtual_pp_degree=2", "need pp_degree > 1 (it is 1)", "dp 8, mp 1, pp 1"),
    (
        8,
        f"{D}.dp_degree=2 {D}.pp_degree=4 {M}.virtual_pp_degree=2 Global.local_batch_size=6 {ONE_BY_ONE}",
        "multiple of pp_degree 4",
        "pp 2",
    ),
    (8, f"{M}.sequence_parallel=True", "needs mp_degree > 1 (it is 1)", "mp 2"),
    (
        8,
        f"{D}.dp_degree=4 {D}.mp_degree=2 {M}.sequence_parallel=True {SEQ_1023}",
        "sequence length (1023)",
        "dp 4, mp 2",
    ),
    (8, f"{D}.dp_degree=4 {D}.sep_degree=2 {SEQ_1023}", "sequence length 1023", "dp 8"),
    (
        8,
        f"{D}.dp_degree=4 {D}.sep_degree=2 Data.Eval.dataset.max_seq_len=1023",
        "Data.Eval.dataset.max_seq_len = 1023 (-o override 3)",
        "dp 8",
    ),
    (
        8,
        f"{D}.dp_degree=4 {D}.mp_degree=2 {M}.sequence_parallel=True Data.Eval.dataset.max_seq_len=33",
        "sequence parallelism needs a sequence length (33) that divides by mp_degree 2",
        "dp 4, mp 2, pp 1, sharding 1",
    ),
    (
        8,
        f"{D}.dp_degree=1 {D}.sep_degree=8 Data.Train.dataset.max_seq_len=1022 "
        "Data.Eval.dataset.max_seq_len=1020",
        "the sequence length 1022 must divide by sep_degree 8",
        "sep 2",
    ),
    (
        8,
        f"{D}.dp_degree=4 {D}.sep_degree=2 {M}.module=GPTEvalModule Offline_Eval.max_seq_len=511",
        "Offline_Eval.max_seq_len = 511",
        "dp 8",
    ),
    (8, f"{D}.dp_degree=1 {D}.sep_degree=8 {M}.num_query_groups=4", "exchanges sequence parts", "sep 4"),
    (
        8,
        f"{D}.dp_degree=1 {D}.sep_degree=4 {D}.mp_degree=2 {M}.num_query_groups=4",
        "sep_degree 4 x mp_degree 2",
        "sep 4",
    ),
    (
        8,
        f"{D}.dp_degree=4 {D}.sharding.sharding_degree=2 {D}.sharding.sharding_offload=True",
        "offload",
        "dp 4, mp 1, pp 1, sharding 2 (stage 2, offload)",
    ),
    (
        8,
        f"{D}.dp_degree=1 {D}.mp_degree=4 {D}.sharding.sharding_degree=2 "
        f"{D}.sharding.sharding_stage=2 {D}.sharding.sharding_offload=True Optimizer.name=Muon",
        "the optimizer needs whole matrices, which mp_degree 4 and expert_mp_degree 4 slice",
        "mp 4, pp 1, sharding 2 (stage 2)",
    ),
    (
        4,
        f"{D}.dp_degree=2 {D}.expert_mp_degree=2 {D}.sharding.sharding_degree=2 Model.moe.num_experts=4 "
        f"{D}.sharding.sharding_stage=2 {D}.sharding.sharding_offload=True Optimizer.name=Muon",
        "which mp_degree 1 and expert_mp_degree 2 slice",
        "",
    ),
    (
        8,
        f"{D}.dp_degree=4 {D}.sharding.sharding_degree=2 {D}.sharding.sharding_stage=4",
        "one of 1, 2, 3",
        "",
    ),
    (8, f"{D}.mp_degree=0", "an integer from 1 to 1048576", ""),
    (8, f"{D}.dp_degree=-1", "an integer from 1 to", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.pp_layers=[[6,6,12]]", "needs pp_degree 2 numbers", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.pp_layers=[12,[12,0]]", "numbers or lists, not both", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.noop_layers=[3]", "do not divide into 2 equal parts", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.noop_layers=[0,26]", "counted from 0 to 25", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.noop_layers=[1,1]", "place 1 is named twice", ""),
    (8, f"{D}.dp_degree=4 {D}.pp_degree=2 {D}.noop_layers=[1] {D}.pp_layers=[12,12]", "both keys", ""),
    (8, "Global.global_batch_size=12", "must be local_batch_size 8", ""),
]


@pytest.mark.parametrize(("processes", "overrides", "rule", "nearest"), IMPOSSIBLE)
def test_the_rule_and_the_nearest_plan_are_named(processes, overrides, rule, nearest):
    message = refusal(FILE, overrides.split(), world_size=processes)
    assert rule in message
    if nearest:
        named = message.partition("nearest ")[2].partition(f"plan for {processes}: ")[2]
        assert nearest in named, message


def test_an_own_optimizer_that_needs_whole_matrices_is_refused_like_muon(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS, "_entries", {**OPTIMIZERS._entries})
    OPTIMIZERS.register("Elementwise", "nowhere:rule")
    OPTIMIZERS.register("Whole", "nowhere:rule", traits=OptimizerTraits(needs_whole_matrices=True))
    plan = [f"{D}.dp_degree=1", f"{D}.mp_degree=4"]
    plan += [f"{D}.sharding.sharding_{key}" for key in ("degree=2", "stage=2", "offload=True")]
    assert load_config(FILE, [*plan, "Optimizer.name=Elementwise"], world_size=8).plan.mp == 4
    message = refusal(FILE, [*plan, "Optimizer.name=Whole"], world_size=8)
    assert "the optimizer needs whole matrices, which mp_degree 4" in message


@pytest.mark.parametrize(
    "overrides",
    [
        f"{D}.sep_degree=2 {M}.module=GPTEvalModule {SEQ_1023}",  # only Offline_Eval is read
        f"{D}.sep_degree=2 Data.Test.dataset.max_seq_len=1023",  # nobody reads it
        f"{D}.mp_degree=2 Data.Eval.dataset.max_seq_len=1023",  # sequences stay whole
        f"{D}.sep_degree=2 Data.Eval=null",
    ],
)
def test_lengths_that_are_not_read_or_not_split_are_free(overrides):
    assert load_config(FILE, [f"{D}.dp_degree=4", *overrides.split()], world_size=8).plan.dp == 4


def test_texts_are_cut_to_lengths_that_every_split_divides(tmp_path):
    """Sequence parallelism within split sequences: 4 x 4 parts, of samples far below max_seq_len."""
    tokenizer = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "response": "a"}\n')
    data = f"name: PromptResponseDataset, input_dir: {tmp_path}, split: train"
    overrides = [
        f"Data={{Train: {{dataset: {{{data}}}}}, tokenizer: {{dir: {tmp_path}}}}}",
        *f"{D}.dp_degree=1 {D}.mp_degree=4 {D}.sep_degree=4 {M}.sequence_parallel=True".split(),
    ]
    dataset = build_dataset(load_config(FILE, overrides, world_size=16), "Train")
    assert dataset.length_multiple == 16


@pytest.mark.parametrize(
    ("overrides", "chunks"),
    [
        ("pp_layers=[7,5,6,6]", (7, 5, 6, 6)),
        ("pp_layers=[[4,3,3,3],[3,3,3,2]] Model.virtual_pp_degree=2", (4, 3, 3, 3, 3, 3, 3, 2)),
        ("noop_layers=[0,27] Model.num_layers=26", (6, 7, 7, 6)),
        ("noop_layers=[27,24] Model.num_layers=30 Model.virtual_pp_degree=2", (4, 4, 4, 4, 4, 4, 2, 4)),
    ],
)
def test_uneven_pipelines_can_be_said_in_three_ways(overrides, chunks):
    given = ["Distributed.dp_degree=1", "Distributed.pp_degree=4", "Global.micro_batch_size=2"]
    cfg = load_config(FILE, [*given, *f"Distributed.{overrides}".split()], world_size=4)
    assert cfg.plan.layers_of_chunks(cfg.Model.num_layers) == chunks
