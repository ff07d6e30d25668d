"""What a user may mistype on a command line: no program goes on, and the message names the option."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from ppfleetx.commands.main import _call
from ppfleetx.config.errors import ConfigError, UserError, shown

MISTAKES = {
    "inspect-verify-json": ("inspect run --json --verify", "--json"),
    "inspect-absent": ("inspect nope", "DIR = 'nope'"),
    "merge-absent": ("merge --input nope --output out", "--input = 'nope'"),
    "finetune-absent": ("finetune --from nope --output out", "--from = 'nope'"),
    "generate-absent": ("generate nope words", "CHECKPOINT = 'nope'"),
    "infer-absent": ("infer nope words", "Inference.model_dir = 'nope' (EXPORT)"),
    "quantize-absent": ("quantize nope --to int8 --output out", "CHECKPOINT = 'nope'"),
    "prepare-eod": ("prepare --input a --output-prefix b --tokenizer t --eod-token x", "--eod-token = 'x'"),
    "tokenizer-frequency": (
        "tokenizer --input a --vocab-size 300 --output b --min-frequency 0",
        "--min-frequency = 0",
    ),
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
}


@pytest.mark.parametrize(("line", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_its_option(line: str, named: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"text": "words"}\n')
    with pytest.raises(UserError) as caught:
        _call(line.split())
    assert named in str(caught.value)


def test_help_of_a_verb(capsys) -> None:
    with pytest.raises(SystemExit):
        _call(["help", "configs"])
    assert "copy NAME DIR" in capsys.readouterr().out


def test_a_second_copy_says_that_it_is_there(tmp_path, capsys) -> None:
    for said in ("copied: ", "already there: "):
        _call(["configs", "copy", "gpt_nano", str(tmp_path)])
        assert capsys.readouterr().out.startswith(said)


def test_a_path_is_shown_as_text() -> None:
    assert shown(PurePosixPath("a")) == "'a'"
    assert "'a'" in str(ConfigError("is taken", key="--write", value=PurePosixPath("a")))
