"""``tasks/gpt/generation.py`` as users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppfleetx.checkpoint.training import model_slices
from ppfleetx.checkpoint.writer import save_checkpoint
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.core.generate import DEFAULT_PROMPT, generate, read_prompts
from ppfleetx.data.tokenizer import Tokenizer
from ppfleetx.distributed.context import ParallelContext

ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def run_dir(tmp_path: Path, make_model, tokenizer: Tokenizer) -> Path:
    """An output directory with one checkpoint, a pretraining and a generation YAML, and a tokenizer."""
    model, _ = make_model(**MODEL)
    named = [(parameter.info.name, parameter) for parameter in model.parameters()]
    train = {"step": 4, "epoch": 0, "consumed_samples": 32}
    save_checkpoint(
        tmp_path / "run",
        epoch=0,
        step=4,
        tensors=model_slices(named),
        state={"train": train},
        vocab_size=300,
        fingerprints={"tokenizer": tokenizer.fingerprint},
    )
    tokenizer.save(tmp_path / "run" / "tokenizer")
    sections = {"Global": {"device": "cpu", "local_batch_size": 2}, "Model": MODEL}
    (tmp_path / "pretrain.yaml").write_text(json.dumps(sections))
    generation = {"Model": {**MODEL, "module": "GPTGenerationModule"}, "Generation": {"max_dec_len": 8}}
    (tmp_path / "generation.yaml").write_text(json.dumps({**sections, **generation}))
    return tmp_path


def in_process(
    run_dir: Path, *overrides: str, config: str = "pretrain.yaml", output: str | None = None
) -> None:
    options = [f"Engine.save_load.ckpt_dir={run_dir / 'run'}", *overrides]
    cfg = load_config(run_dir / config, options)
    generate(cfg, ParallelContext.single(), read_prompts(cfg), output)


def command(
    run_dir: Path, *overrides: str, config: str = "generation.yaml", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    words = [*options, *(word for override in overrides for word in ("-o", override))]
    return subprocess.run(
        [sys.executable, str(ROOT / "tasks/gpt/generation.py"), "-c", str(run_dir / config), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_documented_command(run_dir: Path) -> None:
    """The rank directory of a checkpoint, as the original documentation gives it; no tokenizer named."""
    rank_dir = run_dir / "run" / "epoch_0_step_4" / "mp_00_sharding_00_pp_00"
    assert rank_dir.is_dir()
    done = command(run_dir, f"Engine.save_load.ckpt_dir={rank_dir}", "Generation.max_dec_len=5")
    assert done.returncode == 0, done.stderr
    assert f"\nPrompt: {DEFAULT_PROMPT}\nGeneration: {DEFAULT_PROMPT}" in done.stdout
    again = command(run_dir, f"Engine.save_load.ckpt_dir={run_dir / 'run'}", "Generation.max_dec_len=5")
    assert again.stdout.partition("Generation: ")[2] == done.stdout.partition("Generation: ")[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "Engine.save_load.ckpt_dir: names no checkpoint"),
        (("Engine.save_load.ckpt_dir=/no/such/place",), "/no/such/place"),
        (("Generation.decode_strategy=best",), "Generation.decode_strategy"),
        (("Generation.prompt_file=/no/such/file",), "Generation.prompt_file"),
        (("Generation.prompt=[]",), "Generation.prompt = []"),
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
    ("name", "reason"), [("nowhere/out.jsonl", "there is no directory"), ("run", "it is a directory")]
)
def test_an_output_that_cannot_be_written_is_found_at_once(run_dir: Path, name: str, reason: str) -> None:
    ckpt = f"Engine.save_load.ckpt_dir={run_dir / 'run'}"
    done = command(run_dir, ckpt, options=("--output", str(run_dir / name)))
    assert done.returncode == 2
    assert "Prompt" not in done.stdout and "CPU settings" not in done.stdout
    assert f"--output = {str(run_dir / name)!r}: cannot be written: {reason}" in done.stderr


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


def test_prompts_from_files(run_dir: Path) -> None:
    def read(name: str, content: str) -> list[str]:
        (run_dir / name).write_text(content)
        return read_prompts(
            load_config(run_dir / "pretrain.yaml", [f"Generation.prompt_file={run_dir / name}"])
        )

    assert read("a.txt", "one\n\n  two\x0c2\r\nthree") == ["one", "  two\x0c2", "three"]
    assert read("a.jsonl", '"one"\n{"prompt": "two\\nlines", "id": 3}\n') == ["one", "two\nlines"]
    with pytest.raises(ConfigError, match=r"a\.jsonl:2.*is not JSON"):
        read("a.jsonl", '"one"\n{"prompt": \n')
    with pytest.raises(ConfigError, match='under "prompt"'):
        read("a.jsonl", '{"text": "x"}\n')
    with pytest.raises(ConfigError, match="holds no prompt"):
        read("empty.txt", "\n\n")
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(load_config(run_dir / "pretrain.yaml", ["Generation.prompt_file=/no/file"]))


def test_prompt_defaults(run_dir: Path) -> None:
    assert read_prompts(load_config(run_dir / "pretrain.yaml")) == [DEFAULT_PROMPT]
    cfg = load_config(run_dir / "pretrain.yaml", ["Generation.prompt=just one: text"])
    assert read_prompts(cfg) == ["just one: text"]
