"""Numbers of things in messages."""

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config


@pytest.mark.parametrize(
    ("count", "noun", "spec", "text"),
    [
        (1, "process", "", "1 process"),
        (0, "process", "", "0 processes"),
        (2, "micro batch", "", "2 micro batches"),
        (1, "micro batch", "", "1 micro batch"),
        (3, "corpus", "", "3 corpora"),
        (12000, "sample", ",", "12,000 samples"),
        (12000, "key/value head", "", "12000 key/value heads"),
    ],
)
def test_one_is_singular(count, noun, spec, text):
    assert counted(count, noun, spec) == text


def test_a_report_of_ones(small):
    """One layer, one head, one step: whatever a report counts."""
    ones = [
        *(f"Model.{key}=1" for key in ("num_layers", "num_attention_heads", "num_query_groups")),
        *("Engine.max_steps=1", "Engine.save_load.save_steps=1", "Optimizer.lr.warmup_steps=1"),
        *("Global.local_batch_size=1", "Global.micro_batch_size=1"),
    ]
    report = check_report(load_config(small, ones))
    assert "1 layer, hidden" in report and "1 head of" in report and "1 step, no evaluation" in report
    assert "save every 1 step and" in report and "1 warm-up step to" in report
    pipeline = ["Model.num_layers=2", "Distributed.pp_degree=2", *ones[3:]]
    report = check_report(load_config(small, pipeline, world_size=2))
    assert (
        "1 group of 2" in report and "2 stages of 1 layer" in report and "(1 micro batch per step)" in report
    )


@pytest.mark.parametrize(
    ("overrides", "world", "text"),
    [
        (["Distributed.mp_degree=2"], 1, "1 process was started, but"),
        (["Distributed.mp_degree=2"], 3, "3 processes were started, but"),
        (
            ["Global.local_batch_size=null", "Global.global_batch_size=1", "Distributed.dp_degree=2"],
            2,
            "1 sequence cannot be shared evenly by dp_degree x sharding_degree = 2 data ranks",
        ),
        (
            ["Data.Train.dataset.weights=[1]", "Data.Train.dataset.input_dir=[a, b]"],
            1,
            "1 weight for 2 corpora",
        ),
    ],
)
def test_mistakes_with_one(small, overrides, world, text):
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides, world_size=world)
    assert text in str(caught.value)
