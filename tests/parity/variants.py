"""In a rank: trainings of networks that a plugin or an architecture of its own brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from tests.parity import training

WINDOWED = "WindowInEverySecondBlock"


def train_with_gathered_keys(**arguments: Any) -> dict[str, Any]:
    """`examples/gathered_attention.py`, another attention strategy."""
    import examples.gathered_attention as example

    core = example.GatheredKeys.core
    with mock.patch.object(example.GatheredKeys, "core", autospec=True, side_effect=core) as called:
        found = training.train(**arguments)
    assert bool(called.call_count) == (arguments["world_size"] > 1)
    return found


def train_windowed(**arguments: Any) -> dict[str, Any]:
    """Blocks that differ by index: every second one has a window."""
    from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits

    traits = ArchitectureTraits(spec=_windowed_spec)
    ARCHITECTURES.register(WINDOWED, "ppfleetx.models.gpt.stages:gpt_stages", traits=traits)
    return training.train(**arguments)


def _windowed_spec(cfg: Any) -> Any:
    from ppfleetx.models.gpt.spec import gpt_spec

    spec = gpt_spec(cfg)
    block = spec.blocks[0]
    other = replace(block, attention=replace(block.attention, window=3))
    return replace(spec, blocks=(block, other) * (cfg.num_layers // 2))
