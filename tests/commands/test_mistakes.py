"""Mistakes on a command line: refused before any work, and the message names the option and its value."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from ppfleetx.commands.loss_compare import Compare
from ppfleetx.commands.main import _call
from ppfleetx.config.errors import ConfigError, UserError, shown

TO_HF = "convert --from ppfleetx --to hf --input folder"
FILE = "exists.yaml"
UNDER = f"{FILE}/x"

MISTAKES = {
    "inspect-verify-json": ("inspect run --json --verify", "--json"),
    "inspect-absent": ("inspect nope", "DIR = 'nope'"),
    "merge-absent": ("merge nope --output out", "CHECKPOINT = 'nope'"),
    "merge-nothing": ("merge --output out", "CHECKPOINT"),
    "finetune-absent": ("finetune --from nope --output out", "--from = 'nope'"),
    "generate-absent": ("generate nope words", "CHECKPOINT = 'nope'"),
    "infer-absent": ("infer nope words", "Inference.model_dir = 'nope' (EXPORT)"),
    "quantize-absent": ("quantize nope --to int8 --output out", "CHECKPOINT = 'nope'"),
    "prepare-eod": ("prepare --input a --output-prefix b --tokenizer t --eod-token x", "--eod-token = 'x'"),
    "tokenizer-key": ("tokenizer --input c.jsonl --vocab-size 300 --output b --json-key nope", "key 'nope'"),
    "compare-config": ("compare -c gpt_nano --metrics-a a --metrics-b b", "-c = 'gpt_nano'"),
    "compare-side": ("compare --metrics-a a --metrics-b b --a Global.seed=1", "--a"),
    "compare-picture": ("compare --metrics-a a --metrics-b b --plot run", "--plot = 'run'"),
    "plot-picture": ("plot --metrics m.jsonl --output run", "--output = 'run'"),
    "plugin-empty": ("check -c gpt_nano --plugin=", "--plugin = ''"),
    "convert-data-absent": ("convert-data --input nope --output-prefix m", "no corpus at nope"),
    "plan-explain": ("plan -c gpt_nano --explain foo", "--explain = 'foo'"),
    "index-cache": (
        "index -c gpt_nano -o Data.Train.dataset.cache_dir=c.jsonl",
        "Data.Train.dataset.cache_dir = 'c.jsonl' (-o override 1)",
    ),
    "configs-proc": ("configs copy gpt_nano /proc/nope", "DIR = '/proc/nope'"),
    "configs-file": (f"configs copy gpt_nano {FILE}", f"DIR = '{FILE}'"),
    "plan-report": (f"plan -c gpt_nano --plan dp=1 --report {FILE}", f"--report = '{FILE}'"),
    "tokenizer-output": (f"tokenizer --input c.jsonl --vocab-size 9 --output {UNDER}", f"'{UNDER}'"),
    "stdlib-output": (f"stdlib-corpus --output {UNDER}/y", f"--output = '{UNDER}'"),
    "quantize-output": (f"quantize folder --to int8 --output {UNDER}", f"--output = '{UNDER}'"),
    "prune-output": (f"prune folder --ratio 0.5 --output {UNDER}", f"--output = '{UNDER}'"),
    "merge-output": (f"merge --input folder --output {UNDER}", f"--output = '{UNDER}'"),
    "convert-output": (f"{TO_HF} --output {UNDER}", f"--output = '{UNDER}'"),
    "convert-tokenizer": (f"{TO_HF} --output new --tokenizer nope", "--tokenizer = 'nope'"),
    "compare-work-dir": (f"compare -c gpt_nano --work-dir {UNDER}", f"--work-dir = '{UNDER}'"),
    "compare-plot": (f"compare -c gpt_nano --plot {UNDER}.png", f"--plot = '{UNDER}.png'"),
    "compare-tolerance": ("compare --metrics-a a --metrics-b b --bitwise --rtol 1e-2", "--rtol"),
    "check-directory": ("check -c folder", "folder: is a directory without a config.yaml"),
    "doctor-negative": ("doctor --timeout -1", "--timeout = -1.0"),
    "doctor-nan": ("doctor --timeout nan", "--timeout = nan"),
    "supervise-nothing": ("supervise", "give the command to run after --"),
    "supervise-program": ("supervise -- no-such-program", "COMMAND = 'no-such-program'"),
    "supervise-negative": ("supervise --backoff -1 -- true", "--backoff = -1.0"),
    "translate-absent": ("translate nowhere", "FILE = 'nowhere': there is no such file"),
    "translate-directory": ("translate folder", "FILE = 'folder': is a directory"),
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(FILE).write_text("Global: {}\n")
    Path("c.jsonl").write_text('{"text": "words"}\n')
    Path("folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(("line", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_option(line: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        _call(line.split())
    assert named in str(caught.value)
    assert not Path("new").exists()


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


def test_a_second_copy_says_that_it_is_there(tmp_path, capsys) -> None:
    for said in ("copied: ", "already there: "):
        _call(["configs", "copy", "gpt_nano", str(tmp_path)])
        assert capsys.readouterr().out.startswith(said)


def test_a_path_is_shown_as_text() -> None:
    assert shown(PurePosixPath("a")) == "'a'"
    assert "'a'" in str(ConfigError("is taken", key="--write", value=PurePosixPath("a")))
