"""Options that name what cannot be used: refused before any work, with the option and its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.commands.compare import Compare
from ppfleetx.commands.main import call
from ppfleetx.config.errors import ConfigError, UserError

NANO = ("-c", "debug/gpt_nano")
TO_HF = ("convert", "--from", "ppfleetx", "--to", "hf", "--input", "folder")
FILE = "exists.yaml"
UNDER = f"{FILE}/x"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(FILE).write_text("Global: {}\n")
    Path("text.jsonl").write_text('{"text": "a text"}\n')
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("configs", "copy", "gpt_nano", "/proc/nope"), "DIR", "/proc/nope"),
        (("configs", "copy", "gpt_nano", FILE), "DIR", FILE),
        (("plan", *NANO, "--plan", "dp=1", "--report", FILE), "--report", FILE),
        (("tokenizer", "--input", "text.jsonl", "--vocab-size", "300", "--output", UNDER), "--output", UNDER),
        (("stdlib-corpus", "--output", f"{UNDER}/y"), "--output", UNDER),
        (("quantize", "folder", "--to", "int8", "--output", UNDER), "--output", UNDER),
        (("prune", "folder", "--ratio", "0.5", "--output", UNDER), "--output", UNDER),
        (("merge", "--input", "folder", "--output", UNDER), "--output", UNDER),
        ((*TO_HF, "--output", UNDER), "--output", UNDER),
        ((*TO_HF, "--output", "new", "--tokenizer", "nope"), "--tokenizer", "nope"),
        (("compare", *NANO, "--work-dir", UNDER), "--work-dir", UNDER),
        (("compare", *NANO, "--plot", UNDER), "--plot", UNDER),
    ],
)
def test_a_place_that_cannot_be_used(words: tuple[str, ...], key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(words[0], words[1:])
    assert caught.value.key == key and str(caught.value.value) == value
    assert not Path("new").exists()


def test_a_directory_that_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match=r"folder: is a directory without a config\.yaml"):
        call("check", ["-c", "folder"])


def test_compare_takes_shipped_names_and_says_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> object:
        commands.append(command)
        return type("Done", (), {"returncode": 2, "stderr": "error: Global.x: no\n", "stdout": ""})

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(UserError) as caught:
        Compare(config="gpt_nano").run()
    assert "error:" not in str(caught.value) and "Global.x: no" in str(caught.value)
    assert Path(commands[0][commands[0].index("-c") + 1]).is_file()
