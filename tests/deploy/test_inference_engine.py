"""An exported model gives what the checkpoint gives, token for token."""

import shutil
from pathlib import Path

import paddle
import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig
from ppfleetx.deploy import inference_engine
from ppfleetx.deploy.export_dir import CPU_OPS_FILE
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.nn.cpu_ops import ops as cpu_ops
from tests.deploy.exports import GPT2_STYLE, Exported, make_export

PROMPTS = ["the cat", "and", "the other hat and the ca", "", "é😀"]
SETTINGS = {
    "greedy": {"decode_strategy": "greedy_search"},
    "greedy_with_rules": {"decode_strategy": "greedy_search", "repetition_penalty": 1.3, "min_dec_len": 6},
    "all_of_it": {
        "top_k": 9,
        "top_p": 0.8,
        "temperature": 1.4,
        "repetition_penalty": 1.2,
        "num_return_sequences": 3,
    },
    "top_k": {"top_k": 5, "temperature": 0.8},
    "top_k_of_more_than_there_are": {"top_k": 1000, "top_p": 0.9},
    "top_p": {"top_p": 0.7, "temperature": 1.5},
    "plain": {"temperature": 2.0},
    "colder_than_float32": {"temperature": 1e-45},
    "smaller_than_float32": {"top_p": 1e-50},
    "smaller_than_float32_of_few": {"top_p": 1e-50, "top_k": 5},
    "as_large_as_int64": {"top_k": 2**63 - 1},
    "guesses_as_large_as_int64": {"decode_strategy": "greedy_search", "prompt_lookup_num_tokens": 2**63 - 1},
}


def config(**keys: object) -> GenerationConfig:
    return GenerationConfig(**{"max_dec_len": 24, "seed": 7, **keys})


def engine_at(directory: Path, **options: object) -> InferenceEngine:
    return InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1, **options))


@pytest.mark.parametrize("keys", SETTINGS.values(), ids=SETTINGS.keys())
def test_exported_and_dynamic_texts_are_equal(each: Exported, keys: dict[str, object]) -> None:
    cfg = config(**keys)
    expected = each.generator.generate(PROMPTS, cfg)
    assert each.engine.generate(PROMPTS, cfg) == expected
    # Row by row, which takes the program's other way through its products.
    assert each.engine.generate(PROMPTS[:2], cfg, batch_rows=1) == expected[:2]
    assert len({one.ids for generations in expected for one in generations}) > 3


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("keys", [SETTINGS["greedy"], SETTINGS["top_p"], SETTINGS["plain"]])
def test_the_program_for_any_machine(
    each: Exported, keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where our own operators are not compiled; with them, it is not the program of the other tests."""
    monkeypatch.setattr(inference_engine.cpu_ops, "are_available", lambda: False)
    engine, cfg = engine_at(each.directory), config(**keys)
    assert engine.generate(PROMPTS, cfg) == each.generator.generate(PROMPTS, cfg)
    assert engine.generate(PROMPTS[:2], cfg, batch_rows=1) == engine.generate(PROMPTS[:2], cfg)


def test_room_is_made_more_than_once(exported: Exported) -> None:
    """For the keys and values of a batch, which have room for 32 more at first."""
    cfg = config(decode_strategy="greedy_search", min_dec_len=60, max_dec_len=60)
    found = exported.engine.generate(["a", "the"], cfg)
    assert found == exported.generator.generate(["a", "the"], cfg)
    assert [len(one.ids) for [one] in found] == [60, 60]


def test_a_row_at_its_last_position_does_not_disturb_the_others(each: Exported) -> None:
    """The long prompt leaves 6 of the 64 positions; the others go on after it has ended."""
    prompts, cfg = [*PROMPTS, "é" * 29], GenerationConfig(seed=7, decode_strategy="greedy_search")
    found = each.engine.generate(prompts, cfg)
    assert found == each.generator.generate(prompts, cfg)
    assert len(found[-1][0].ids) == 6
    assert max(len(one.ids) for [one] in found) == 20


def test_stop_texts_and_pieces(exported: Exported) -> None:
    greedy = {"decode_strategy": "greedy_search"}
    [[free]] = exported.engine.generate(["the cat"], config(**greedy))
    cfg = config(**greedy, stop=free.text[4:7])
    pieces: list[tuple[int, int, str]] = []
    found = exported.engine.generate(
        PROMPTS, cfg, first_prompt=3, on_text=lambda *piece: pieces.append(piece)
    )
    assert found == exported.generator.generate(PROMPTS, cfg, first_prompt=3)
    assert found[0][0].finish_reason == "stop"
    assert found[0][0].text == free.text[: free.text.index(free.text[4:7])]
    for number, [one] in enumerate(found, 3):
        assert "".join(text for prompt, copy, text in pieces if (prompt, copy) == (number, 0)) == one.text


def test_settings_that_a_program_does_not_read(exported: Exported) -> None:
    with pytest.raises(ConfigError, match=r"Generation.use_cache = False"):
        exported.engine.generate(PROMPTS, config(use_cache=False))


def test_the_directory_needs_nothing_else(exported: Exported, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(exported.directory, moved)
    cfg = config(decode_strategy="greedy_search")
    expected = exported.generator.generate(PROMPTS, cfg)
    names = sorted(path.relative_to(moved).as_posix() for path in moved.rglob("*") if path.is_file())
    model = [name for name in names if not name.startswith("tokenizer/")]
    faster = [CPU_OPS_FILE] if cpu_ops.are_available() else []
    assert model == sorted(["export.json", "model.json", "model.pdiparams", *faster])
    assert str(exported.run.parent) not in (moved / "export.json").read_text()
    for options in ({"onednn": True}, {"ir_optim": False}):
        engine = engine_at(moved, **options)
        assert engine.generate(PROMPTS, cfg) == expected, options
        assert engine.generate(PROMPTS[:2], cfg, batch_rows=1) == expected[:2], options


def test_without_the_second_copy_of_the_matrices(tmp_path: Path) -> None:
    plain = make_export(tmp_path, {**GPT2_STYLE, "num_layers": 1}, "Inference.panels=False")
    cfg = config(decode_strategy="greedy_search")
    expected = plain.generator.generate(PROMPTS, cfg)
    assert plain.engine.generate(PROMPTS, cfg) == expected
    assert plain.engine.generate(PROMPTS, cfg, batch_rows=1) == expected


def test_another_paddle_is_named(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paddle, "__version__", "9.9.9")
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    with caplog.at_level("WARNING", logger="ppfleetx"):
        engine_at(exported.directory)
    assert any("this is 9.9.9" in message for message in caplog.messages)
