"""The harness's interface, against the harness's own Hugging Face model with the same weights."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ppfleetx.commands.generate import load_generator
from ppfleetx.commands.lm_eval import find_tasks
from ppfleetx.commands.model_verbs import LmEval
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ppfleetx.distributed.context import ParallelContext
from tests.e2e.program import NANO

GOLDENS = Path(__file__).parents[1] / "goldens"
WORDS = "the cat sat on a mat and then it ran to a house of dogs where cats are not liked"
TASK = """
task: tiny_last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {place}/texts.jsonl}}, cache_dir: {place}/cache}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' ' + text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""


@pytest.fixture
def harness_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our module with stand-ins for the harness, which need not be installed."""

    class TemplateLM:
        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            before = self.tok_encode(context)
            return before, self.tok_encode(context + continuation)[len(before) :]

    def windows(
        token_list: list[int], prefix_token: int, *_: int, **__: int
    ) -> list[tuple[list[int], list[int]]]:
        return [([prefix_token], token_list)]

    modules = {
        "lm_eval.api.instance": {"Instance": object},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.utils": {"get_rolling_token_windows": windows, "make_disjoint_window": lambda pair: pair},
    }
    for name in ("lm_eval", "lm_eval.api", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ppfleetx.commands.lm_eval_model", raising=False)
    module = importlib.import_module("ppfleetx.commands.lm_eval_model")
    monkeypatch.delitem(sys.modules, "ppfleetx.commands.lm_eval_model")
    return module


@pytest.mark.parametrize(
    ("asked", "options", "stops"),
    [
        (
            {"until": ["\n", ""], "do_sample": False, "temperature": 0.0},
            {"max_dec_len": 9, "decode_strategy": "greedy_search"},
            ["\n"],
        ),
        (
            {"until": "x", "max_gen_toks": 5, "temperature": 0.7, "top_p": 0.9},
            {"max_dec_len": 5, "top_k": 50, "top_p": 0.9, "decode_strategy": "sampling", "temperature": 0.7},
            ["x"],
        ),
        (
            {"num_beams": 3, "max_new_tokens": 4, "top_k": 50},
            {"max_dec_len": 4, "num_beams": 3, "decode_strategy": "beam_search", "length_penalty": 1.0},
            [],
        ),
    ],
)
def test_options_of_tasks_in_words_of_ours(
    harness_model: ModuleType, asked: dict, options: dict, stops: list
) -> None:
    assert harness_model.generation_options(asked, 9) == (options, stops)


def test_options_that_generation_lacks_are_named(harness_model: ModuleType) -> None:
    for asked in ({"num_beams": 3, "do_sample": True}, {"eta_cutoff": 0.2}):
        with pytest.raises(ConfigError, match=f"{next(iter(asked))} = "):
            harness_model.generation_options(asked, 9)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Our model and the harness's, of the same weights: 48 positions, so that texts have to be cut."""
    reason = "needs lm-evaluation-harness (pip install 'ppfleetx[lm_eval]') with torch and transformers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # before the import that reads it: nothing is looked up
        huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    place = tmp_path_factory.mktemp("harness")
    tokenizer = train_tokenizer([WORDS] * 3, 280)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_positions=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=tokenizer.eod_id,
        eos_token_id=tokenizer.eod_id,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(place / "hf")
    tokenizer.save(place / "hf")
    convert(Conversion("hf", "ppfleetx", place / "hf", place / "ours"))
    options = ["Global.device=cpu", f"Engine.save_load.ckpt_dir={place / 'ours'}"]
    cfg = load_config(place / "ours" / "config.yaml", options)
    from ppfleetx.commands.lm_eval_model import HarnessModel

    generator = load_generator(cfg, ParallelContext.single())
    ours = HarnessModel(generator, cfg.Model.vocab_size, batch_size=3)
    theirs = huggingface.HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(place / "hf"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(place / "hf"),
        device="cpu",
        batch_size=1,
    )
    return ours, theirs


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_log_likelihoods_are_the_harnesses_own(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    asked = [
        ("the cat", " sat on a mat"),
        ("", "the dogs"),
        ("then it ran ", "to a house"),  # the space goes with the continuation
        (WORDS * 3, " of dogs"),  # longer than the model: its end
        ("a", " b"),
    ]
    greedy = theirs.generate_until(requests(("the cat", {"until": [], "max_gen_toks": 3})))[0]
    asked.append(("the cat", greedy))
    found = ours.loglikelihood(requests(*asked), disable_tqdm=True)
    expected = theirs.loglikelihood(requests(*asked), disable_tqdm=True)
    assert [log_prob for log_prob, _ in found] == pytest.approx([each for each, _ in expected], rel=1e-5)
    assert [right for _, right in found] == [right for _, right in expected]
    assert {right for _, right in found} == {True, False}


def test_rolling_log_likelihoods_are_the_harnesses_own(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    asked = requests((WORDS,), (WORDS * 4,), ("cat",))
    found = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-5)
    assert ours.loglikelihood_rolling(requests(("",)), disable_tqdm=True) == [0.0]


def test_continuations_are_the_harnesses_own(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    plain = {"until": [], "max_gen_toks": 12, "do_sample": False}
    whole = theirs.generate_until(requests(("the cat sat", plain)))[0]
    stopping = {**plain, "until": [whole[4:6], "never"]}
    beams = {**stopping, "num_beams": 3}
    asked = requests(
        ("the cat sat", plain), ("a", stopping), (WORDS * 3, plain), ("the cat sat", stopping), ("it", beams)
    )
    found = ours.generate_until(asked, disable_tqdm=True)
    assert found == theirs.generate_until(asked, disable_tqdm=True)
    assert found[3] == whole[: whole.index(whole[4:6])]
    with pytest.raises(ConfigError, match="48 positions"):
        ours.generate_until(requests(("a", {"max_gen_toks": 48})), disable_tqdm=True)
    with pytest.raises(ConfigError, match=r"generation does not have .*: top_p: "):
        ours.generate_until(
            requests(("a", {"max_gen_toks": 4, "top_p": 2.0, "do_sample": True})), disable_tqdm=True
        )


def test_a_task_of_ones_own(both: tuple[Any, Any], tmp_path: Path) -> None:
    texts = [f"{WORDS} {word}" for word in WORDS.split()]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tiny.yaml").write_text(TASK.format(place=tmp_path))
    from lm_eval import simple_evaluate

    asked = {"tasks": ["tiny_last_word"], "task_manager": find_tasks(["tiny_last_word"], str(tmp_path))}
    found, expected = (
        simple_evaluate(model=model, **asked, bootstrap_iters=0, log_samples=False)["results"]
        for model in both
    )
    for metric in ("acc,none", "perplexity,none"):
        value = expected["tiny_last_word"][metric]
        assert found["tiny_last_word"][metric] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("is_installed", "options", "words"),
    [
        (True, {"num_fewshot": -1}, "--num-fewshot = -1: "),
        (True, {}, "Engine.save_load.ckpt_dir: names no checkpoint"),
        (None, {"config": "there is no such file"}, r"pip install 'ppfleetx\[lm_eval\]'"),
    ],
)
def test_mistakes_are_found_before_paddle_is_loaded(
    is_installed: bool | None, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "ppfleetx.commands.lm_eval"
    monkeypatch.setattr(f"{program}.find_spec", lambda name: is_installed)
    monkeypatch.setattr(f"{program}.start_with", lambda cfg: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=words):
        LmEval(**{"config": str(NANO), "tasks": "a task", **options}).run()


def test_bos_begins_a_text_once(harness_model: ModuleType) -> None:
    for name in ("llama2", "llama3", "gpt2"):
        tokenizer = Tokenizer.load(GOLDENS / "tokenizers" / name)
        generator = SimpleNamespace(
            tokenizer=tokenizer, max_positions=64, next_token_model=SimpleNamespace(model=None)
        )
        model = harness_model.HarnessModel(generator, 600)
        scored: list[tuple[list[int], list[int]]] = []
        model._loglikelihood_tokens = lambda parts, scored=scored, **_: (
            scored.extend((before, after) for _, before, after in parts) or [(0.0, True)] * len(parts)
        )
        model.loglikelihood(requests(("the dog", " jumps"), ("", "the dog")))
        model.loglikelihood_rolling(requests(("the dog",)))
        whole = tokenizer.encode_prompt("the dog jumps")
        assert [*scored[0][0], *scored[0][1]] == whole
        start = [tokenizer.start_id]
        bare = tokenizer.encode_prompt("the dog", add_special_tokens=False)
        assert scored[1:] == [(start, bare)] * 2
        assert model.tok_encode("the dog") == tokenizer.encode_prompt("the dog")
