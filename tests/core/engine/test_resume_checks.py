"""What a run may change in the network and the data that it goes on with, and how a refusal names the key."""

from types import SimpleNamespace

import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import load_config
from ppfleetx.config.reading.parse import Sections
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.core.engine.resume_checks import check_resumed, check_same_function

ROPE = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 1,
    "position_embedding_type": "rope",
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("change", [{"rope_scaling": YARN}, {"rotary_base": 5e5}])
def test_a_new_run_may_stretch_positions_and_says_so(change, caplog):
    saved = ModelConfig(**ROPE).model_dump(mode="json")
    checkpoint = SimpleNamespace(path="run", manifest=SimpleNamespace(config={"Model": saved}))
    stretched = ModelConfig(**ROPE, **change)
    [key] = change
    with pytest.raises(
        CheckpointError, match=f"was trained with Model.{key} = .*would compute something else"
    ):
        check_same_function(checkpoint, stretched)
    with caplog.at_level("INFO", logger="ppfleetx"):
        check_same_function(checkpoint, stretched, may_stretch=True)
    assert f"the weights were trained with Model.{key} = " in caplog.text
    # Everything else stays what it was.
    with pytest.raises(CheckpointError, match="norm_epsilon"):
        check_same_function(checkpoint, ModelConfig(**ROPE, **change, norm_epsilon=1e-3), may_stretch=True)


def test_of_a_changed_hidden_size_that_key_is_named():
    saved = ModelConfig(**ROPE).model_dump(mode="json")
    checkpoint = SimpleNamespace(path="run", manifest=SimpleNamespace(config={"Model": saved}))
    with pytest.raises(CheckpointError, match=r"Model\.hidden_size = 8, this configuration has 16: "):
        check_same_function(checkpoint, ModelConfig(**{**ROPE, "hidden_size": 16}))


def test_of_a_mixture_the_changed_key_alone_is_named():
    moe = {"num_experts": 4, "expert_ffn_size": 8}
    saved = ModelConfig(**ROPE, moe=moe).model_dump(mode="json")
    checkpoint = SimpleNamespace(path="run", manifest=SimpleNamespace(config={"Model": saved}))
    with pytest.raises(CheckpointError, match=r"Model\.moe\.top_k = 2, this configuration has 1: "):
        check_same_function(checkpoint, ModelConfig(**ROPE, moe=moe | {"top_k": 1}))


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"Engine": {"max_steps": 20}},
            r"Engine\.max_steps = 20 \(was 10\): the run reads the corpus another",
        ),
        (
            {"Data": {"Train": {"dataset": {"seed": 7, "max_seq_len": 8}}}},
            r"Data\.Train\.dataset\.seed = 7 \(was None\)\)",
        ),
    ],
)
def test_another_order_of_the_data_names_what_changed(change, words):
    sections = {
        "Model": ROPE,
        "Global": {"local_batch_size": 1},
        "Engine": {"max_steps": 10},
        "Data": {"Train": {"dataset": {"max_seq_len": 8}}},
    }
    saved, now = (load_config(Sections(one, "here")) for one in (sections, sections | change))
    manifest = SimpleNamespace(config=saved.model_dump(mode="json"), fingerprints={"data": "a"})
    with pytest.raises(CheckpointError, match=words):
        check_resumed(SimpleNamespace(path="run", manifest=manifest), now, {"data": "b"})
