"""Token ids of Hugging Face ``generate`` on the same weights (recipe: tests/goldens/make_hf_generate.py)."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config.sections.root import ModelConfig
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.generation.beam import BeamOptions, beam_search
from ppfleetx.generation.decode_loop import Rules, decode
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.logits_processors import candidates
from ppfleetx.generation.sampling_params import RowTokens, SamplingParams, process_logits
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.stage import canonical_parameters
from tests.generation.hf_weights import CONFIGS, PROMPTS, random_weight
from tests.helpers.hf_weights import canonical_to_hf, hf_to_canonical

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "hf_generate.json").read_text())
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
BEAM = [case for case in GOLDEN["gpt2"] if case.startswith("beam")]
GREEDY = [case for case in GOLDEN["gpt2"] if not case.startswith("beam")]


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def next_token(family: str) -> NextTokenModel:
    config = CONFIGS[family]
    cfg = ModelConfig(**model_keys(config))
    model = StagedModel(gpt_stages(cfg, LocalFactory()))
    model.eval()
    parameters = canonical_parameters(model)
    shapes = dict(canonical_to_hf(config, lambda name: parameters[name].numpy()))
    weights = {name: random_weight(name, value.shape) for name, value in shapes.items()}
    for name, value in hf_to_canonical(config, weights.__getitem__):
        whole = parameters[name].numpy()
        whole[tuple(slice(0, size) for size in value.shape)] = value
        parameters[name].set_value(whole)
    return NextTokenModel(model, cfg.vocab_size)


def rules_of(family: str, options: dict) -> Rules:
    return Rules(
        tuple(GOLDEN["ends"][family][: options.get("eos", 0)]),
        options.get("min_new_tokens", 0),
        row_options(options),
        options.get("forced_bos_token_id"),
        options.get("forced_eos_token_id"),
    )


def row_options(options: dict) -> SamplingParams:
    """Options of transformers that act on logits; a bias is of single tokens here."""
    known = {key: value for key, value in options.items() if key in SamplingParams.__dataclass_fields__}
    known["suppress_tokens"] = tuple(options.get("suppress_tokens", ()))
    known["bad_words"] = tuple(map(tuple, options.get("bad_words_ids", ())))
    known["logit_bias"] = tuple((ids[0], bias) for ids, bias in options.get("sequence_bias", ()))
    return SamplingParams(**known)


def comparable(golden: dict) -> tuple[list[list[int]], list]:
    """Prompts and what Hugging Face made of them; a first token it forces after prompts of one token only."""
    if "forced_bos_token_id" not in golden["options"]:
        return PROMPTS, golden["ids"]
    numbers = [number for number, prompt in enumerate(PROMPTS) if len(prompt) == 1]
    return [PROMPTS[number] for number in numbers], [golden["ids"][number] for number in numbers]


@pytest.mark.slow_after(18)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "full_forward"])
@pytest.mark.parametrize("case", GREEDY)
def test_greedy(next_token: NextTokenModel, family: str, case: str, use_cache: bool) -> None:
    """All prompts in one batch of unequal lengths."""
    golden = GOLDEN[family][case]
    rules = rules_of(family, golden["options"])
    prompts, expected = comparable(golden)
    session = DecodingSession(next_token, prompts, use_cache=use_cache)
    with paddle.no_grad():
        rows = decode(session, rules, [GOLDEN["new_tokens"]] * len(prompts))
    assert [[row.ids] for row in rows] == expected


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("case", BEAM)
def test_beam_search(next_token: NextTokenModel, family: str, case: str) -> None:
    """All prompts in one batch of unequal lengths. Hugging Face's own default length penalty is 1."""
    golden = GOLDEN[family][case]
    options = golden["options"]
    beams = BeamOptions(
        options["num_beams"], options.get("length_penalty", 1.0), options.get("early_stopping", False)
    )
    copies = options.get("num_return_sequences", 1)
    prompts, expected = comparable(golden)
    session = DecodingSession(next_token, prompts, use_cache=True)
    with paddle.no_grad():
        limits = [GOLDEN["new_tokens"]] * len(prompts)
        rows = beam_search(session, rules_of(family, options), limits, beams, copies)
    ids = [row.ids for row in rows]
    assert [ids[i : i + copies] for i in range(0, len(ids), copies)] == expected


@pytest.mark.parametrize("case", GOLDEN["processed"]["cases"], ids=lambda case: "-".join(case["options"]))
def test_same_logits_become_the_same_distribution(case: dict) -> None:
    """The probability of each token after all of transformers' processors."""
    logits = paddle.to_tensor(np.array(GOLDEN["processed"]["logits"], np.float32))
    options = row_options(case["options"])
    rows = [RowTokens(ids, 0) for ids in GOLDEN["processed"]["ids"]]
    weights = candidates(
        process_logits(logits, options, rows), **{name: getattr(options, name) for name in SAMPLING}
    ).numpy()
    found = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, np.array(case["probabilities"]), atol=2e-6)
