"""What a new run may change in the network it starts from: how far its positions are stretched."""

from types import SimpleNamespace

import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.core.engine.resume_checks import check_same_function

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
