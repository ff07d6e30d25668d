"""Building a runner in one process."""

from pathlib import Path

import numpy as np
import pytest

from ppfleetx.commands.train import build_runner
from ppfleetx.config.loader import load_config
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn import stage

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


def test_weights_that_a_checkpoint_brings_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], stage.draw
    monkeypatch.setattr(
        stage, "draw", lambda init, seed, name, *at: drawn.append(name) or draw(init, seed, name, *at)
    )
    runners = {}
    for train in (True, False):
        drawn.clear()
        runners[train] = build_runner(load_config(NANO), ParallelContext.single(), train=train)
        names = [name for name, _ in runners[train].named_parameters()]
        assert drawn == (names if train else [])
    trained, empty = (dict(runner.named_parameters()) for runner in runners.values())
    assert trained.keys() == empty.keys()
    for name, parameter in empty.items():
        assert parameter.shape == trained[name].shape
        assert len(np.unique(parameter.numpy())) == 1, "what Paddle fills in without drawing"
