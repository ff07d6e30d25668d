"""What a process asks of Paddle before the first operation."""

from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.distributed.init import init_distributed

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


@pytest.mark.parametrize(
    ("flag", "rule"),
    [("FLAGS_no_such_flag=1", "has no such flag"), ("FLAGS_check_nan_inf=often", "does not take it")],
)
def test_a_flag_paddle_does_not_take_is_named(flag: str, rule: str) -> None:
    cfg = load_config(NANO, [f"Global.flags.{flag}"])
    name, _, value = flag.partition("=")
    with pytest.raises(ConfigError, match=rule) as caught:
        init_distributed(cfg)
    assert caught.value.key == f"Global.flags.{name}"
    assert str(caught.value.value) == value
    assert caught.value.place == "-o override 1"
