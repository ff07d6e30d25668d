"""What a tool says when a library it needs is missing."""

import pytest

from ppfleetx.utils.cli import EXIT_USER_ERROR, run_tool
from ppfleetx.utils.installed import not_installed


def fail_to_import(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("paddle", "Paddle is not installed in this Python: on a CPU run `pip install 'ppfleetx[cpu]'`"),
        ("paddle.distributed", "on a GPU install paddlepaddle-gpu 3.3.x"),
        ("yaml", "pyyaml is not installed in this Python: run `pip install -e .`"),
        ("pydantic", "pydantic is not installed"),
    ],
)
def test_a_missing_library_is_one_sentence(capsys, module, words):
    with pytest.raises(SystemExit) as end:
        run_tool(lambda: fail_to_import(module))
    assert end.value.code == EXIT_USER_ERROR
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and words in errors and errors.count("\n") == 1


def test_whoever_needs_the_build_for_gpus_is_sent_where_it_is(monkeypatch):
    """The general index ends with a version that does not work here."""
    from ppfleetx.config.errors import ConfigError
    from ppfleetx.distributed.init import choose_device
    from ppfleetx.utils import devices

    monkeypatch.setattr(devices, "_is_installed", lambda name: name == "paddlepaddle")
    said = []
    for choose in (devices.expected_device, choose_device):
        with pytest.raises(ConfigError) as caught:
            choose("gpu")
        assert caught.value.key == "Global.device"
        said.append(str(caught.value))
    said.append(str(not_installed(ModuleNotFoundError(name="paddle"))))
    for text in said:
        assert "paddlepaddle-gpu 3.3.x" in text and "Paddle's own package index" in text


def test_a_module_of_the_program_that_is_missing_is_a_defect():
    with pytest.raises(ModuleNotFoundError):
        run_tool(lambda: fail_to_import("ppfleetx.no_such_module"))
