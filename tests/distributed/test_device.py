"""The module that knows kinds of devices. Missing cards are simulated at the Paddle API."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base import core

from ppfleetx.distributed import device
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.random import DropoutStreams


class Place:
    """Card 3 of some kind."""

    def get_device_id(self) -> int:
        return 3


class Card:
    """Simulate a card as the device of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, place_class: str) -> None:
        place_of_kind = type(place_class, (Place,), {})
        self.place, self.seeds, self.asked = place_of_kind(), [], []
        monkeypatch.setattr(core, place_class, place_of_kind)
        monkeypatch.setattr(paddle, place_class, place_of_kind)
        for name in ("_current_expected_place", "_current_expected_place_"):
            monkeypatch.setattr(paddle.framework, name, lambda: self.place)
        monkeypatch.setattr(paddle, "get_device", lambda: f"{kind}:3")
        for name in ("default_cuda_generator", "default_xpu_generator", "default_custom_device_generator"):
            monkeypatch.setattr(core, name, partial(self._find_generator, name))

    def _find_generator(self, name: str, which: object) -> SimpleNamespace:
        self.asked.append((name, which))
        return SimpleNamespace(manual_seed=self.seeds.append)


@pytest.mark.parametrize(
    ("kind", "place_class", "expected"),
    [
        ("gpu", "CUDAPlace", ("default_cuda_generator", 3)),
        ("xpu", "XPUPlace", ("default_xpu_generator", 3)),
        ("npu", "CustomPlace", ("default_custom_device_generator", "the place")),
    ],
)
def test_dropout_is_seeded_where_the_device_draws(monkeypatch, kind, place_class, expected):
    before = core.default_cpu_generator().initial_seed()
    card = Card(monkeypatch, kind, place_class)
    streams = DropoutStreams(7, ParallelContext.single())
    layer = paddle.nn.Dropout(0.5)
    for step in (1, 2):
        streams.begin_step(step)
        streams._enter(layer, 0)
    assert len(set(card.seeds)) == 2
    name, which = expected
    assert card.asked == [(name, card.place if which == "the place" else which)] * 2
    assert core.default_cpu_generator().initial_seed() == before, "nothing is drawn there"


def test_the_cpu_s_generator_gives_the_same_numbers_as_paddle_seed():
    paddle.seed(7)
    expected = paddle.uniform([4]).numpy()
    device.generator().manual_seed(7)
    np.testing.assert_array_equal(paddle.uniform([4]).numpy(), expected)


def test_a_thread_asks_the_card_of_its_process(monkeypatch):
    chosen = []
    monkeypatch.setattr(core, "set_cuda_current_device_id", chosen.append, raising=False)
    device.select_card_for_thread(Card(monkeypatch, "gpu", "CUDAPlace").place)
    assert chosen == [3]
    device.select_card_for_thread(core.CPUPlace())
    assert chosen == [3]


@pytest.mark.parametrize(("kind", "level"), [("cpu", 1), ("gpu", 1), ("npu", 2)])
def test_errors_of_a_plugin_come_with_their_place(kind, level):
    before = paddle.get_flags("FLAGS_call_stack_level")
    try:
        paddle.set_flags({"FLAGS_call_stack_level": 1})
        device.name_errors(f"{kind}:0")
        assert paddle.get_flags("FLAGS_call_stack_level") == {"FLAGS_call_stack_level": level}
    finally:
        paddle.set_flags(before)
