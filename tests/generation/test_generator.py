"""Prompts in, text out: limits, stop strings, streaming, reproducibility."""

from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections.root import GenerationConfig, ModelConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.generator import Generator
from ppfleetx.generation.text_io import RowText

PROMPTS = ["the cat", "and", "the other hat and the ca", "", "é😀"]


@pytest.fixture
def generator(make_model, tokenizer: Tokenizer) -> Generator:
    model, cfg = make_model(vocab_size=320, num_layers=1)
    model.train()
    return Generator(model, cfg, tokenizer)


def config(**keys: object) -> GenerationConfig:
    return GenerationConfig(**{"max_dec_len": 12, "seed": 7, **keys})


def test_sampling_is_reproducible_and_depends_on_the_seed(generator: Generator) -> None:
    cfg = config(num_return_sequences=3, temperature=1.2)
    first = generator.generate(PROMPTS, cfg)
    assert generator.generate(PROMPTS, cfg) == first
    assert generator.generate(PROMPTS, config(num_return_sequences=3, temperature=1.2, seed=8)) != first
    assert [len(generations) for generations in first] == [3] * len(PROMPTS)
    texts = [one.text for one in first[0]]
    assert len(set(texts)) == 3


def test_seed_of_the_run_counts_when_the_section_has_none(generator: Generator) -> None:
    with_section = generator.generate(PROMPTS, config(seed=5), seed=1)
    assert generator.generate(PROMPTS, config(seed=None), seed=5) == with_section
    assert generator.generate(PROMPTS, config(seed=None), seed=6) != with_section


def test_batches_do_not_change_results(generator: Generator) -> None:
    cfg = config(num_return_sequences=2, temperature=1.2)
    whole = generator.generate(PROMPTS, cfg, batch_rows=100)
    assert generator.generate(PROMPTS, cfg, batch_rows=4) == whole
    assert generator.generate(PROMPTS, cfg, batch_rows=1) == whole
    assert generator.generate(PROMPTS[2:], cfg, first_prompt=2) == whole[2:]


def test_ids_and_text_belong_together(generator: Generator, tokenizer: Tokenizer) -> None:
    for [one] in generator.generate(PROMPTS, config(max_dec_len=40, temperature=2.0)):
        assert one.text == tokenizer.decode(one.ids, skip_special_tokens=True)
        assert one.finish_reason == ("stop" if one.ids[-1] == tokenizer.eod_id else "length")
        assert len(one.ids) == 40 or one.finish_reason == "stop"
        # The model has 320 ids, the tokenizer fewer: what cannot be written is not generated.
        assert max(one.ids) < tokenizer.vocab_size < 320


def test_token_ids_as_prompts(generator: Generator, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert generator.generate(ids, config()) == generator.generate(PROMPTS, config())
    with pytest.raises(DataError, match="token id 315"):
        generator.generate([[3, 315]], config())


def test_stop_string_ends_the_text_before_it(generator: Generator) -> None:
    greedy = config(decode_strategy="greedy_search", max_dec_len=30)
    [[free]] = generator.generate(["the cat"], greedy)
    stop = free.text[4:7]
    cut = free.text[: free.text.index(stop)]
    for stops in (stop, ("no such text", stop)):
        [[one]] = generator.generate(["the cat"], greedy.model_copy(update={"stop": stops}))
        assert (one.text, one.finish_reason) == (cut, "stop")
        assert len(one.ids) < 30


def test_streamed_pieces_make_up_the_text(generator: Generator) -> None:
    pieces: dict[tuple[int, int], list[str]] = {}

    def on_text(prompt: int, copy: int, piece: str) -> None:
        pieces.setdefault((prompt, copy), []).append(piece)

    cfg = config(num_return_sequences=2, temperature=1.5, max_dec_len=30)
    results = generator.generate(PROMPTS, cfg, on_text=on_text, batch_rows=4, first_prompt=10)
    for i, generations in enumerate(results):
        for copy, one in enumerate(generations):
            assert "".join(pieces[10 + i, copy]) == one.text
    assert max(len(parts) for parts in pieces.values()) > 5


def test_room_is_checked_in_numbers(generator: Generator) -> None:
    long_prompt = "é" * 29  # 58 tokens of the 64 positions
    with pytest.raises(ConfigError, match=r"58 tokens, which leaves room for 6 more in the model's 64"):
        generator.generate(["the", long_prompt], config(max_dec_len=7))
    [[fits]] = generator.generate([long_prompt], config(max_dec_len=6, min_dec_len=6))
    assert len(fits.ids) == 6
    with pytest.raises(ConfigError, match="room for 0 more"):
        generator.generate(["é" * 40], GenerationConfig())


def test_default_length_gives_way_to_the_room_there_is(generator: Generator) -> None:
    """Only the long prompt is cut short; the others do not suffer from it."""
    cfg = GenerationConfig(seed=7, min_dec_len=1)
    free = generator.generate(PROMPTS, cfg)
    beside = generator.generate([*PROMPTS, "é" * 29], cfg)
    assert beside[:-1] == free
    assert len(beside[-1][0].ids) == 6


def test_beam_search_through_the_generator(generator: Generator) -> None:
    pieces: list[str] = []
    cfg = config(decode_strategy="beam_search", num_beams=3, num_return_sequences=2, length_penalty=1.0)
    results = generator.generate(PROMPTS, cfg, on_text=lambda prompt, copy, piece: pieces.append(piece))
    assert generator.generate(PROMPTS, cfg, batch_rows=1) == results
    assert "".join(pieces) == "".join(one.text for generations in results for one in generations)
    one_beam = config(decode_strategy="beam_search")
    assert generator.generate(PROMPTS, one_beam) == generator.generate(
        PROMPTS, config(decode_strategy="greedy_search")
    )


def test_forced_tokens_through_the_generator(generator: Generator, tokenizer: Tokenizer) -> None:
    cfg = config(forced_bos_token_id=65, forced_eos_token_id=tokenizer.eod_id, min_dec_len=12)
    for [one] in generator.generate(PROMPTS, cfg):
        assert (one.ids[0], one.ids[-1], len(one.ids), one.finish_reason) == (
            65,
            tokenizer.eod_id,
            12,
            "stop",
        )
    with pytest.raises(ConfigError, match=r"Generation.forced_bos_token_id = 310: .* has ids 0 to"):
        generator.generate(PROMPTS, config(forced_bos_token_id=310))


def test_strategies_say_what_they_cannot_do() -> None:
    for keys, words in (
        ({"decode_strategy": "greedy_search", "num_return_sequences": 2}, "one result per prompt"),
        (
            {"decode_strategy": "beam_search", "num_beams": 2, "num_return_sequences": 3},
            "2 beams cannot give 3",
        ),
        ({"decode_strategy": "beam_search", "stop": "."}, "takes no stop texts"),
        ({"stop": ""}, "the empty text"),
        ({"stop": (".", "")}, "the empty text"),
        ({"repetition_penalty": 1e-40}, "greater than or equal to 0.01"),  # float32 has no such logits
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_rate": 1.0}, "4 beams do not divide into 3"),
        ({"num_beams": 4, "num_beam_groups": 2}, "without it all groups find the same"),
    ):
        with pytest.raises(ValueError, match=words):
            config(**keys)


def test_the_model_goes_back_to_training(generator: Generator) -> None:
    """Dropout is off while generating (the model's probabilities are 0.1), and on again afterwards."""
    model = generator._model
    results = {
        tuple(generator.generate(["the"], config(decode_strategy="greedy_search", max_dec_len=30))[0][0].ids)
        for _ in range(3)
    }
    assert len(results) == 1
    assert model.training


def test_row_text_never_shows_part_of_a_stop_string(tokenizer: Tokenizer) -> None:
    shown: list[str] = []
    row = RowText(tokenizer, ["stop", "tap"], (), shown.append)
    for token in tokenizer.encode("one sto, two st, three stop four"):
        ended = row.feed(token)
        assert not "".join(shown).endswith((" s", " st", " sto"))
    assert ended
    assert row.finish() == "".join(shown) == "one sto, two st, three "


@pytest.mark.parametrize(
    ("minimum", "length", "text"), [(0, 3, " cat"), (2, 3, " cat"), (3, 6, " cat\n cat")]
)
def test_a_stop_string_of_byte_tokens_ends_the_text_at_once(minimum: int, length: int, text: str) -> None:
    """Such tokens have no text of their own until their run is complete."""
    llama = Tokenizer.load(Path(__file__).parents[1] / "goldens/tokenizers/llama2")
    line = [*llama.encode("cat"), llama.encode("\n")[-1]]
    assert (len(line), llama.token_bytes(line[-1])) == (3, b"<0x0A>")
    row = RowText(llama, ["\n"], llama.encode_prompt("the"), min_tokens=minimum)
    assert [row.feed(token) for token in [*line, *line]].index(True) == length - 1
    assert row.finish() == text


def test_row_text_gives_back_what_it_held_at_the_end(tokenizer: Tokenizer) -> None:
    row = RowText(tokenizer, ["stop"], ())
    for token in tokenizer.encode("the sto"):
        assert not row.feed(token)
    assert row.finish() == "the sto"


def test_models_positions_limit_rotary_models_too(make_model, tokenizer: Tokenizer) -> None:
    model, cfg = make_model(vocab_size=320, num_layers=1, position_embedding_type="rope")
    assert isinstance(cfg, ModelConfig)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        Generator(model, cfg, tokenizer).generate(["the"], config(max_dec_len=64))
