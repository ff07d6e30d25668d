"""Generation on the card against the CPU's tokens, and programs exported here and there."""

import json
from functools import partial

import pytest

from ppfleetx.commands.checkpoint_verbs import Quantize
from ppfleetx.commands.quantize import quantize
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.compress.runs import DEEPSEEK, MODELS
from tests.compress.runs import write_run as write_small_run
from tests.deploy.exports import STYLES, write_run
from tests.operators.scenarios import SMALL

pytestmark = pytest.mark.device

LENGTH = "Generation.max_dec_len=24"
BEAMS = ["Generation.decode_strategy=beam_search", "Generation.num_beams=4"]
SAMPLING = ["Generation.decode_strategy=sampling", LENGTH]
STRATEGIES = {
    "greedy": ["Generation.decode_strategy=greedy_search", LENGTH],
    "greedy without guesses": [
        "Generation.decode_strategy=greedy_search",
        "Generation.prompt_lookup_num_tokens=0",
        LENGTH,
    ],
    "without cache": ["Generation.decode_strategy=greedy_search", "Generation.use_cache=False", LENGTH],
    "sampling": [*SAMPLING, "Generation.temperature=1.3", "Generation.num_return_sequences=3"],
    "top k": [*SAMPLING, "Generation.top_k=12", "Generation.temperature=0.8"],
    "top p": [*SAMPLING, "Generation.top_p=0.9", "Generation.temperature=1.5"],
    "penalty": [*SAMPLING, "Generation.repetition_penalty=1.3", "Generation.min_dec_len=5"],
    "beams": [*BEAMS, LENGTH],
    "groups of beams": [*BEAMS, "Generation.num_beam_groups=2", "Generation.diversity_rate=0.5", LENGTH],
}
WITH_SMALL_WEIGHTS = {**MODELS, "latent_style": DEEPSEEK}
EXPORTED = ("greedy", "sampling", "top k", "top p", "penalty")


@pytest.fixture(scope="module", params=list(STYLES))
def style(request):
    return request.param


@pytest.fixture(scope="module")
def trained(style, tmp_path_factory):
    """A checkpoint with a tokenizer."""
    return write_run(tmp_path_factory.mktemp(style) / "run", STYLES[style])


def test_the_cpu_s_tokens(alone, device, style, trained):
    arguments = {"run": str(trained), "style": style, "strategies": STRATEGIES}
    expected = alone("texts:generate", device="cpu", **arguments)
    found = alone("texts:generate", device=device, **arguments)
    assert found == expected
    assert len({tuple(texts) for texts in found.values()}) >= 5, "the strategies differ"


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(mp=2)], ids=str)
def test_two_cards_generate_what_one_does(pools, need_cards, device, style, trained, tmp_path, plan):
    need_cards(2)
    file = trained.parent / f"{style}_two.yaml"
    sections = {
        "Global": {"device": device, "local_batch_size": 2, "seed": 11},
        "Model": {**STYLES[style], "module": "GPTGenerationModule"},
        "Engine": {"save_load": {"ckpt_dir": str(trained), "output_dir": str(tmp_path / "out")}},
        "Generation": {"prompt": ["the cat", "and", "the hat and the"], "max_dec_len": 12},
    }
    file.write_text(json.dumps(sections))
    runs = {"greedy": STRATEGIES["greedy"], "sampling": STRATEGIES["top p"], "beams": STRATEGIES["beams"]}
    degrees = {1: [], 2: [f"Distributed.dp_degree={plan.dp}", f"Distributed.mp_degree={plan.mp}"]}
    one, two = (
        pools(size).run(
            "tests.generation.program:generate_each",
            timeout=300.0,
            config=str(file),
            plan=degrees[size],
            runs=runs,
            output=str(tmp_path / f"{size}_"),
            world=size,
        )
        for size in (1, 2)
    )
    assert two[0] == one[0]


@pytest.mark.parametrize("way", SMALL)
def test_weights_of_few_bits(alone, need_type, device, style, tmp_path, record_property, way):
    """float32 gives the CPU's tokens; 16 bits begin with the same ones."""
    source = write_small_run(tmp_path / "run", WITH_SMALL_WEIGHTS[style])
    groups = {"group": 8} if "group" in SMALL[way] else {}  # divides every width of the three models
    quantize(Quantize(checkpoint=str(source), output=str(tmp_path / "small"), **SMALL[way] | groups))
    texts = partial(alone, "texts:generate_with_few_bits", run=str(tmp_path / "small"))
    expected = texts(device="cpu", dtype="float32")
    assert texts(device=device, dtype="float32") == expected
    for dtype in ("float16", "bfloat16"):
        need_type(dtype)
        pairs = zip(texts(device=device, dtype=dtype), expected, strict=True)
        same = [sum(a == b for a, b in zip(*pair, strict=False)) / len(pair[1]) for pair in pairs]
        record_property(dtype, same)
        assert max(same) > 0.5


@pytest.mark.parametrize("exports_on", ["the card", "the cpu"])
def test_an_exported_program_writes_the_same(alone, device, style, trained, tmp_path, exports_on):
    strategies = {name: STRATEGIES[name] for name in EXPORTED}
    arguments = {"run": str(trained), "style": style}
    expected = alone("texts:generate", device="cpu", strategies=strategies, **arguments)
    made_on = device if exports_on == "the card" else "cpu"
    exported = alone("texts:export", device=made_on, directory=str(tmp_path / "export"), **arguments)
    for runs_on in dict.fromkeys((device, "cpu")):
        found = alone("texts:infer", exported=exported, device=runs_on, strategies=strategies, **arguments)
        assert found == expected, f"made on {made_on}, run on {runs_on}"
