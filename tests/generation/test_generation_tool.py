"""``tasks/gpt/generation.py`` as users run it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.commands.generate import DEFAULT_PROMPT, generate, read_prompts
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.distributed.context import ParallelContext
from tests.generation.conftest import RUN_MODEL, write_run
from tests.helpers import programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """An output directory with one checkpoint, a pretraining and a generation YAML, and a tokenizer."""
    write_run(tmp_path, tokenizer)
    return tmp_path


def in_process(
    run_dir: Path, *overrides: str, config: str = "pretrain.yaml", output: str | None = None
) -> None:
    options = [f"Engine.save_load.ckpt_dir={run_dir / 'run'}", *overrides]
    cfg = load_config(run_dir / config, options)
    generate(cfg, ParallelContext.single(), read_prompts(cfg), output)


def command(
    run_dir: Path,
    *overrides: str,
    config: str | Path = "generation.yaml",
    options: tuple[str, ...] = (),
    executed: bool = False,
) -> subprocess.CompletedProcess:
    words = [*options, *(word for override in overrides for word in ("-o", override))]
    return programs.run(
        [sys.executable, str(ROOT / "tasks/gpt/generation.py"), "-c", str(run_dir / config), *words],
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        executed=executed,
    )


def test_the_documented_command(run_dir: Path) -> None:
    """The file named dp8 in one process, and a rank directory, as the original documentation gives them."""
    rank_dir = run_dir / "run" / "epoch_0_step_4" / "mp_00_sharding_00_pp_00"
    assert rank_dir.is_dir()
    options = ["Generation.max_dec_len=5", "Global.seed=1024", "Generation.top_k=50", "Generation.top_p=0.75"]
    shrunk = [f"Model.{key}={value}" for key, value in RUN_MODEL.items()] + ["Model.ffn_hidden_size=null"]
    done = command(
        run_dir,
        f"Engine.save_load.ckpt_dir={rank_dir}",
        f"Data.tokenizer.dir={run_dir / 'run' / 'tokenizer'}",
        *shrunk,
        *options,
        config=ROOT / "ppfleetx/configs/nlp/gpt/generation_gpt_345M_dp8.yaml",
        executed=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"\nPrompt: {DEFAULT_PROMPT}\nGeneration: {DEFAULT_PROMPT}" in done.stdout
    again = command(
        run_dir, f"Engine.save_load.ckpt_dir={run_dir / 'run'}", *options, "Generation.min_dec_len=1"
    )
    assert again.stdout.partition("Generation: ")[2] == done.stdout.partition("Generation: ")[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "Engine.save_load.ckpt_dir: names no checkpoint"),
        (("Engine.save_load.ckpt_dir=/no/such/place",), "/no/such/place"),
        (("Model.module=GPTFinetuneModule", "Model.num_classes=2"), "only models that continue text"),
        (("Generation.decode_strategy=best",), "Generation.decode_strategy"),
        (("Generation.num_beams=3",), "Generation.num_beams = 3 (-o "),
        (("Generation.decode_strategy=greedy_search", "Generation.top_k=3"), "Generation.top_k = 3 (-o "),
        (("Generation.prompt_file=/no/such/file",), "Generation.prompt_file"),
        (("Generation.prompt=[]",), "Generation.prompt = []"),
        (("Generation.prompt=",), "(-o override 1): is empty; give a prompt"),
        (('Generation.prompt=["the", " "]',), "Generation.prompt.1 = ' ' (-o override 1): is blank"),
    ],
)
def test_a_users_mistake_is_one_quick_message(
    run_dir: Path, overrides: tuple[str, ...], message: str
) -> None:
    done = command(run_dir, *overrides)
    assert done.returncode == 2
    assert "CPU settings" not in done.stdout, "Paddle was loaded for nothing"
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere/out.jsonl", "there is no directory"),
        ("run", "it is a directory"),
        ("run/latest", "a file is there that holds something else than results"),
        ("/dev/null", "it is a device"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_at_once(run_dir: Path, name: str, reason: str) -> None:
    ckpt = f"Engine.save_load.ckpt_dir={run_dir / 'run'}"
    done = command(run_dir, ckpt, options=("--output", str(run_dir / name)))
    assert done.returncode == 2
    assert "Prompt" not in done.stdout and "CPU settings" not in done.stdout
    assert "error: --output = " in done.stderr  # and the file, perhaps shortened
    assert f"{name}': cannot be written: {reason}" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("Generation.prompt=the cat and the hat and", "Generation.max_dec_len=60"),
            r"error: Generation\.max_dec_len = 60.*: prompt 0 has \d+ tokens, which leaves room for \d+ more",
        ),
        (
            ("Model.vocab_size=200", "Generation.prompt=the"),
            r"error: .* has \d+ token ids, added tokens included, and the model 200 \(Model.vocab_size\)",
        ),
    ],
)
def test_what_only_the_checkpoint_shows_is_one_message_too(
    run_dir: Path, overrides: tuple[str, ...], message: str
) -> None:
    done = command(run_dir, f"Engine.save_load.ckpt_dir={run_dir / 'run'}", *overrides)
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "Prompt" not in done.stdout


def test_several_prompts_and_sequences(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_dir / "out.jsonl"
    in_process(
        run_dir,
        'Generation.prompt=["the cat", "and\\nthe hat"]',
        "Generation.num_return_sequences=2",
        f"Data.tokenizer.dir={run_dir / 'run' / 'tokenizer'}",
        output=str(output),
    )
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "and\nthe hat"]
    expected = ""
    for line in lines:
        expected += f"Prompt: {line['prompt']}\n"
        assert len(line["generations"]) == 2
        for one in line["generations"]:
            expected += f"Generation: {line['prompt']}{one['text']}\n\n"
            assert len(one["ids"]) <= 20
    assert printed == expected


def test_pretraining_and_generation_yaml_give_the_same(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for config in ("pretrain.yaml", "generation.yaml"):
        in_process(run_dir, "Generation.prompt=the", "Generation.max_dec_len=8", config=config)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("Prompt: the\nGeneration: the")


def test_missing_tokenizer(run_dir: Path) -> None:
    (run_dir / "run" / "tokenizer").rename(run_dir / "elsewhere")
    with pytest.raises(ConfigError, match=r"Data.tokenizer: names no tokenizer.*-o Data.tokenizer.dir=DIR"):
        in_process(run_dir)


def test_prompts_from_files(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str, content: str) -> list[str]:
        (run_dir / name).write_text(content)
        return read_prompts(
            load_config(run_dir / "pretrain.yaml", [f"Generation.prompt_file={run_dir / name}"])
        )

    assert read("a.txt", "one\n\n  two\x0c2\r\nthree") == ["one", "  two\x0c2", "three"]
    assert read("a.jsonl", '"one"\n{"prompt": "two\\nlines", "id": 3}\n') == ["one", "two\nlines"]
    assert read("mark.txt", "\ufeffone\n") == read("mark.jsonl", '\ufeff"one"\n') == ["one"]
    with pytest.raises(ConfigError, match=r"a\.jsonl:2.*is not JSON"):
        read("a.jsonl", '"one"\n{"prompt": \n')
    with pytest.raises(ConfigError, match='under "prompt"'):
        read("a.jsonl", '{"text": "x"}\n')
    with pytest.raises(ConfigError, match="holds no prompt"):
        read("empty.txt", "\n\n")
    with pytest.raises(ConfigError, match=r"is blank.*\[b\.jsonl:2|b\.jsonl:2.*is blank"):
        read("b.jsonl", '"one"\n{"prompt": " "}\n')
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(load_config(run_dir / "pretrain.yaml", ["Generation.prompt_file=-"]))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(load_config(run_dir / "pretrain.yaml", ["Generation.prompt_file=/no/file"]))


def test_prompt_defaults(run_dir: Path) -> None:
    assert read_prompts(load_config(run_dir / "pretrain.yaml")) == [DEFAULT_PROMPT]
    cfg = load_config(run_dir / "pretrain.yaml", ["Generation.prompt=just one: text"])
    assert read_prompts(cfg) == ["just one: text"]
