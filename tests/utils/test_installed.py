"""Missing libraries are reported, and every attribute used of a library exists right after its import."""

from pathlib import Path

import pytest

from ppfleetx.utils.exit_codes import EXIT_USER_ERROR, run_tool
from ppfleetx.utils.installed import not_installed
from tests.utils.python import run_python


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
    from ppfleetx.distributed.device import choose_device
    from ppfleetx.utils import device_support

    monkeypatch.setattr(device_support, "_is_installed", lambda name: name == "paddlepaddle")
    said = []
    for choose in (device_support.expected_device, choose_device):
        with pytest.raises(ConfigError) as caught:
            choose("gpu")
        assert caught.value.key == "Global.device"
        said.append(str(caught.value))
    said.append(str(not_installed(ModuleNotFoundError(name="paddle"))))
    for text in said:
        assert "paddlepaddle-gpu 3.3.x" in text and "Paddle's own package index" in text


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CUSTOM_DEVICE_ROOT": "PLUGINS"}, "libx.so: this plugin of Paddle does not load: file too short"),
        ({"CUSTOM_DEVICE_ROOT": "EMPTY"}, "Global.device = 'npu': Paddle has found no plugin for npu"),
        ({}, "Global.device = 'npu': the Paddle installed here supports cpu only"),
    ],
)
def test_a_device_that_does_not_come_is_one_sentence(tmp_path, variables, said):
    (tmp_path / "PLUGINS").mkdir()
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "PLUGINS/libx.so").write_text("no library")
    code = (
        "from ppfleetx.utils.exit_codes import run_tool\n"
        "from ppfleetx.utils.device_support import expected_device\n"
        "from ppfleetx.utils.process_env import import_paddle\n"
        "def main():\n    expected_device('npu')\n    import_paddle()\n"
        "    from ppfleetx.distributed.device import choose_device\n    choose_device('npu')\n"
        "run_tool(main)"
    )
    more = {name: str(tmp_path / folder) for name, folder in variables.items()}
    done = run_python(code, GLOG_minloglevel="1", **more)
    assert done.returncode == EXIT_USER_ERROR
    assert said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_rank_without_a_card_is_refused(monkeypatch):
    """Of a launcher other than ours, which starts more ranks than there are cards."""
    from ppfleetx.config.errors import ConfigError
    from ppfleetx.distributed import device

    monkeypatch.setattr(device, "cards_here", lambda: ["gpu"])
    monkeypatch.setattr(device, "count", lambda kind: 2)
    for number in ("0", "1"):
        monkeypatch.setenv("FLAGS_selected_gpus", number)
        assert device.choose_device("auto") == device.choose_device("gpu") == "gpu"
    monkeypatch.setenv("FLAGS_selected_gpus", "2")
    for wanted in ("auto", "gpu"):
        with pytest.raises(ConfigError, match="a card that this machine does not have") as caught:
            device.choose_device(wanted)
        assert (caught.value.key, caught.value.value) == ("FLAGS_selected_gpus", "2")
    assert device.choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("file", "device"), [("libpaddle-custom-npu.so", "npu"), ("libother.so", "cpu"), (None, "cpu")]
)
def test_a_plugin_in_a_directory_of_its_own_is_found_by_its_name(monkeypatch, tmp_path, file, device):
    from ppfleetx.utils.device_support import PLUGINS_ROOT, expected_device

    monkeypatch.chdir(tmp_path)
    if file is None:
        monkeypatch.delenv(PLUGINS_ROOT, raising=False)
        Path("libpaddle-custom-npu.so").touch()  # it is not asked for
    else:
        (tmp_path / file).touch()
        monkeypatch.setenv(PLUGINS_ROOT, str(tmp_path))
    assert expected_device("auto") == device


@pytest.mark.parametrize(
    "directory",
    ["paddle_custom_npu-3.3.1.dist-info", "paddle-custom-npu-1.0.dist-info", "Paddle_Custom_NPU.egg-info"],
)
def test_an_installed_plugin_is_found_by_the_name_of_its_package(monkeypatch, tmp_path, directory):
    from ppfleetx.utils.device_support import PLUGINS_ROOT, expected_device

    monkeypatch.delenv(PLUGINS_ROOT, raising=False)
    (tmp_path / directory).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert expected_device("auto") == "npu"


def test_a_module_of_the_program_that_is_missing_is_a_defect():
    with pytest.raises(ModuleNotFoundError):
        run_tool(lambda: fail_to_import("ppfleetx.no_such_module"))
