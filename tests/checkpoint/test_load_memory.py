"""A rank's memory while it loads: its own share and the largest tensor, whatever the size of the model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any


def test_a_rank_of_four_loads_within_its_share(pools, tmp_path):
    (saved,) = pools(1).run("tests.checkpoint.test_load_memory:save", output_dir=str(tmp_path))
    results = pools(4).run(
        "tests.checkpoint.test_load_memory:load",
        timeout=120.0,
        path=saved["path"],
        plan={"Distributed.mp_degree": 4},
        world=4,
    )
    limit = 1.2 * (saved["all"] / 4 + saved["largest"])
    for result in results:
        assert result["held"] < 1.05 * saved["all"] / 4  # norms and positions are everywhere
        assert result["held"] + result["besides"] <= limit, (result, saved)
        assert result["read"] <= saved["all"]


# -- in the ranks

# 21.5 MiB of weights, the word embedding with 8 MiB being the largest tensor: nothing hides in the noise.
MODEL = {
    "Model.vocab_size": 8192,
    "Model.hidden_size": 256,
    "Model.num_layers": 4,
    "Model.num_attention_heads": 8,
    "Model.ffn_hidden_size": 1024,
    "Model.max_position_embeddings": 64,
}


def save(output_dir: str) -> dict[str, int]:
    """Save a new model; bytes of all its tensors and of the largest."""
    from ppfleetx.checkpoint.manager import save_checkpoint
    from ppfleetx.checkpoint.reader import open_checkpoint
    from ppfleetx.checkpoint.state_dict import model_slices

    runner, cfg = _runner({}, 1)
    slices = model_slices(runner.named_parameters())
    path = save_checkpoint(
        output_dir, epoch=0, step=1, tensors=slices, state={}, vocab_size=cfg.Model.vocab_size
    )
    sizes = [entry.num_bytes for entry in open_checkpoint(path).manifest.tensors.values()]
    return {"path": str(path), "all": sum(sizes), "largest": max(sizes)}


def load(path: str, plan: dict[str, int], world: int) -> dict[str, int]:
    """Load it under a plan: bytes this rank holds, bytes it needed besides at worst, bytes it read."""
    from ppfleetx.checkpoint import storage
    from ppfleetx.checkpoint.reader import open_checkpoint
    from ppfleetx.checkpoint.state_dict import load_model

    runner, cfg = _runner(plan, world)
    names = runner.model_names()
    held = sum(parameter.size * parameter.element_size() for _, parameter in runner.named_parameters())
    read, original = [0], storage._read_full

    def counting(file: Any, target: memoryview) -> None:
        read[0] += len(target)
        original(file, target)

    checkpoint = open_checkpoint(path)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _memory("VmRSS")
    storage._read_full = counting
    try:
        load_model(runner.named_parameters(), checkpoint, vocab_size=cfg.Model.vocab_size, model_names=names)
    finally:
        storage._read_full = original
    return {"held": held, "besides": _memory("VmHWM") - before, "read": read[0]}


def _runner(plan: dict[str, int], world: int) -> tuple[Any, Any]:
    import paddle

    from ppfleetx.config.loader import load_config
    from ppfleetx.core.module.build import build_module
    from ppfleetx.distributed.init import init_distributed
    from ppfleetx.parallel.parallelize import parallelize
    from tests.e2e.program import NANO, SETTINGS

    values = {**SETTINGS, **MODEL, **plan}
    cfg = load_config(NANO, [f"{key}={value}" for key, value in values.items()], world_size=world)
    with paddle.utils.unique_name.guard():
        return parallelize(build_module(cfg), cfg, init_distributed(cfg), train=False), cfg


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)
