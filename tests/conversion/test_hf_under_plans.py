"""A converted Hugging Face model gives under tensor parallelism what Hugging Face computes."""

from __future__ import annotations

import numpy as np
import pytest

from ppfleetx.conversion.convert import Conversion, convert
from tests.conversion import hf_dirs, test_families
from tests.helpers.ranks import Pools
from tests.models.gpt_builders import load_golden


def logits_under_plan(config: str, overrides: list[str], world: int, tokens: list[list[int]]) -> list:
    """In a rank: its columns of the logits, ``[b, s, columns]`` as nested lists, in float32."""
    import paddle

    from ppfleetx.commands.train import build_runner, find_weights
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    cfg = load_config(config, overrides, world_size=world)
    with paddle.utils.unique_name.guard(), paddle.no_grad():
        ctx = init_distributed(cfg)
        runner = build_runner(cfg, ctx, train=False)
        find_weights(cfg, ctx).restore_weights(runner, cfg.Model)
        runner.model.eval()
        return runner.model(paddle.to_tensor(tokens)).transpose([1, 0, 2]).tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "stablelm_norms", "stablelm_norms_serial"])
def test_logits_are_hugging_faces(pools: Pools, tmp_path, name: str, sequence_parallel: bool) -> None:
    """Against what transformers computed: GPT-2 with tied embeddings, Llama with 6 heads in 2 groups,
    StableLM with a gain for each head."""
    if name in test_families.TOLD:
        source = test_families.directory_of(tmp_path, name)
        tokens, expected = test_families.logits_of(name)
    else:
        source = hf_dirs.write(tmp_path / "hf", name)
        _, arrays = load_golden(name)
        tokens, expected = arrays["tokens"], arrays["logits"]
    convert(Conversion("hf", "ppfleetx", source, tmp_path / "ours"))
    overrides = [
        "Distributed.mp_degree=2",
        f"Model.sequence_parallel={sequence_parallel}",
        f"Engine.save_load.ckpt_dir={tmp_path / 'ours'}",
        f"Data.Train.dataset.max_seq_len={tokens.shape[1]}",
    ]
    parts = pools(2).run(
        "tests.conversion.test_hf_under_plans:logits_under_plan",
        config=str(tmp_path / "ours" / "config.yaml"),
        overrides=overrides,
        world=2,
        tokens=tokens.tolist(),
    )
    halves = [np.array(part, np.float32) for part in parts]
    assert halves[0].shape == halves[1].shape, "each rank has its half of the padded vocabulary"
    logits = np.concatenate(halves, axis=-1)[..., : expected.shape[-1]]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
