"""Several adapters over one base, chosen by ``model``: each answers as its merged weights do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import paddle
import pytest

from ppfleetx.checkpoint.adapters import BASE, base_fingerprint, merge_lora, read_adapters
from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.slices import TensorSlice
from ppfleetx.commands.generate import load_generator
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.root import GenerationConfig, ModelConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.adapters import Adapters
from ppfleetx.generation.decoding_session import DecodingSession, NextTokenModel
from ppfleetx.generation.generator import Generator
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import InferenceFactory
from ppfleetx.utils.bfloat16 import from_bfloat16, to_bfloat16
from tests.deploy.server.browser import is_installed, started
from tests.deploy.server.conftest import MODEL, Server, command, running
from tests.helpers import programs

PROMPTS = ["the cat and", "the hat", "a"]
LATENT = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "latent_attention": {"kv_rank": 12, "rope_head_dim": 4, "nope_head_dim": 6, "value_head_dim": 8},
}
TARGETS = {"fox": ("*.qkv", "*.fc1"), "owl": ("*",)}


def write_adapters(
    directory: Path,
    base: Path,
    seed: int,
    *targets: str,
    tokenizer: str | None = None,
    template: str | None = None,
) -> Path:
    """A checkpoint of adapters alone, as a run with ``Model.lora.base`` saves it."""
    lora = {"rank": 3, "alpha": 12.0, "targets": list(targets), "base": str(base)}
    model = ModelConfig(**{**MODEL, "lora": lora})
    rng = np.random.default_rng(seed)
    shapes = {name: shape for name, shape in parameter_shapes(model).items() if ".lora." in name}
    values = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    weights = open_resolved(resolve_checkpoint(base))
    fingerprints = {
        BASE: base_fingerprint(weights, [name for name in parameter_shapes(model) if ".lora." not in name]),
        "tokenizer": tokenizer or weights.manifest.fingerprints["tokenizer"],
    }
    documents = {} if template is None else {"tokenizer/chat_template.jinja": template.encode()}
    more = {"fingerprints": fingerprints, "documents": documents}
    return save(directory, "F32", values, model.model_dump(mode="json"), **more)


def save(directory: Path, dtype: str, arrays: dict[str, np.ndarray], model: dict, **more: object) -> Path:
    """A checkpoint of these tensors, with a ``Model`` section."""
    tensors = [
        TensorSlice(name, "model", dtype, value.shape, (0,) * value.ndim, value.shape, value)
        for name, value in arrays.items()
    ]
    common = {"epoch": 0, "step": 2, "state": {}, "vocab_size": MODEL["vocab_size"]}
    save_checkpoint(directory, tensors=tensors, config={"Model": model}, **common, **more)
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, served_checkpoint: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    base = served_checkpoint / "run"
    return {
        name: write_adapters(root / name, base, seed, *targets, template="x" if name == "owl" else None)
        for seed, (name, targets) in enumerate(TARGETS.items())
    }


@pytest.fixture(scope="module")
def server(adapters, served_checkpoint, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "adapters.log"
    names = ", ".join(f"{name}: {place}" for name, place in adapters.items())
    with running(served_checkpoint, log, f"Serve.adapters={{{names}}}", "Serve.max_batch_size=9") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def generator_of(served_checkpoint: Path, run: Path) -> Generator:
    tokenizer = f"Data.tokenizer.dir={served_checkpoint / 'run' / 'tokenizer'}"
    options = [f"Engine.save_load.ckpt_dir={run}", tokenizer]
    return load_generator(load_config(served_checkpoint / "config.yaml", options), ParallelContext.single())


def test_an_adapter_of_another_chat_template_is_reported(server) -> None:
    assert "adapter 'owl' was trained with another chat template" in server.log
    assert "adapter 'fox' was trained with another" not in server.log


def test_each_adapter_answers_as_its_merged_weights_do(
    adapters, client, server, served_checkpoint, offline, tmp_path
):
    options = GenerationConfig(decode_strategy="greedy_search", max_dec_len=20)
    expected = {"gpt": [row[0].text for row in offline.generate(PROMPTS, options)]}
    for name, place in adapters.items():
        merge_lora(place, tmp_path / name)
        merged = generator_of(served_checkpoint, tmp_path / name)
        expected[name] = [row[0].text for row in merged.generate(PROMPTS, options)]
    assert len({tuple(texts) for texts in expected.values()}) == 3

    asked = [(name, prompt) for prompt in PROMPTS for name in expected]
    bodies = [{"model": name, "prompt": text, "max_tokens": 20, "temperature": 0} for name, text in asked]
    for _ in range(2):  # the second time with the keys and values of the first
        done = server.together(bodies)
        assert [one.model for one in done] == [name for name, _ in asked]
        answers = dict(zip(asked, (one.choices[0].text for one in done), strict=True))
        for name, texts in expected.items():
            assert [answers[name, prompt] for prompt in PROMPTS] == texts, name
    counted = {name: f'ppfleetx_generated_tokens_total{{model="{name}"}}' for name in expected}
    before = {name: server.metric(one) for name, one in counted.items()}
    assert min(before.values()) > 0
    client.completions.create(
        model="owl", prompt="a", max_tokens=3, temperature=0, extra_body={"ignore_eos": True}
    )
    after = {name: server.metric(one) - before[name] for name, one in counted.items()}
    assert after == {"gpt": 0, "fox": 0, "owl": 3}


def test_embeddings_and_the_list_of_models_know_them(client):
    assert [model.id for model in client.models.list()] == ["gpt", "fox", "owl"]
    assert client.models.retrieve("owl").id == "owl"
    vectors = {
        name: client.embeddings.create(model=name, input="the cat").data[0].embedding
        for name in ("gpt", "fox", "owl")
    }
    assert len({tuple(vector) for vector in vectors.values()}) == 3
    with pytest.raises(openai.NotFoundError, match="'gpt', 'fox', 'owl'"):
        client.completions.create(model="cat", prompt="a")


@pytest.mark.skipif(not is_installed(), reason="needs chromium and chromedriver")
def test_two_of_them_answer_side_by_side_on_the_page(server, client, tmp_path):
    with started(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.wait(lambda: browser.text("model") == "gptfoxowl", "the models are listed")
        browser.set(model="fox", second="owl", max_tokens=8, temperature=0)
        for count, question in enumerate(("the cat", "and"), start=1):
            browser.write("prompt", question)
            browser.click("go")
            browser.wait(lambda: browser.text("note").count("8 tokens in") == 2, "both have ended")
            browser.run("say('')")
            bodies = browser.run(
                "return [...document.querySelectorAll('.pair .body')].map(b => b.textContent)"
            )
            assert len(bodies) == 2 * count
        browser.resize(500, 800)  # as narrow as Chromium's window can be
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        heads = browser.run("return [...document.querySelectorAll('.pair span')].map(s => s.textContent)")
        assert heads == ["fox", "owl"] * 2
        for place, name in enumerate(("fox", "owl")):
            first = _said(client, name, [("user", "the cat")])
            turns = [("user", "the cat"), ("assistant", first), ("user", "and")]
            expected = [first, _said(client, name, turns)]
            assert [text.strip() for text in bodies[place::2]] == [text.strip() for text in expected]


def _said(client: openai.OpenAI, name: str, turns: list[tuple[str, str]]) -> str:
    conversation = [{"role": role, "content": content} for role, content in turns]
    done = client.chat.completions.create(
        model=name, messages=conversation, max_tokens=8, temperature=0, top_p=0.95
    )
    return done.choices[0].message.content


def test_adapters_that_do_not_fit_are_refused(served_checkpoint, offline, tmp_path):
    base = served_checkpoint / "run"
    place = write_adapters(tmp_path / "one", base, 0, "*")
    found = read_adapters(place, base)
    assert found.lora.scale == 4.0
    with pytest.raises(CheckpointError, match="no such linear"):
        Adapters(offline.next_token_model).add("x", {"decoder.layers.7.mlp.fc1.lora.a": None}, scale=1.0)
    assert found.template is None
    assert read_adapters(write_adapters(tmp_path / "t", base, 0, "*", template="x"), base).template == "x"
    other = write_adapters(tmp_path / "other", base, 0, "*", tokenizer="of another text")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        read_adapters(other, base)
    merged = merge_lora(place, tmp_path / "merged")
    with pytest.raises(CheckpointError, match="over other weights"):
        read_adapters(place, merged.parent)
    with pytest.raises(CheckpointError, match="not trained with adapters"):
        read_adapters(merged.parent, base)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["Serve.adapters={gpt: x}"], "is the base model's name"),
        (["Serve.adapters={x: y}", "Model.lora.rank=2"], "Model.lora"),
        (["Serve.adapters={x: nowhere}"], "Serve.adapters.x = 'nowhere'"),
    ],
)
def test_a_server_refuses_them_before_it_loads_the_model(served_checkpoint, overrides, words):
    done = programs.run(command(served_checkpoint, *overrides), timeout=60, env=dict(os.environ))
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "with the weights of" not in done.stdout + done.stderr


def test_adapters_over_latent_attention_leave_no_trace():
    """Decoding keeps projections that it cuts out of a matrix which the adapters change."""
    cfg = ModelConfig(**{**MODEL, **LATENT})
    network = StagedModel(gpt_stages(cfg, InferenceFactory()), seed=5)
    for parameter in network.parameters():
        parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
    model = NextTokenModel(network, cfg.vocab_size)
    shapes = parameter_shapes(cfg.model_copy(update={"lora": LoraConfig(rank=3)}))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(0, 0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
        if ".kv_up.lora." in name
    }
    adapters = Adapters(model)
    adapters.add("one", tensors, scale=1.0)

    def logits(name: str | None) -> np.ndarray:
        session = DecodingSession(model, [[5, 6, 7]], use_cache=True)
        with paddle.no_grad(), adapters.using(name):
            session.next_logits()
            session.append(np.array([8]))
            return session.next_logits().numpy()

    def expected(name: str | None) -> np.ndarray:
        with paddle.no_grad(), adapters.using(name):
            return DecodingSession(model, [[5, 6, 7, 8]], use_cache=False).next_logits().numpy()

    names = ("one", None, "one", None)
    wanted = {name: expected(name) for name in names}
    assert np.abs(wanted["one"] - wanted[None]).max() > 0.01
    for name in names:
        np.testing.assert_allclose(logits(name), wanted[name], atol=1e-4)


def test_adapters_with_their_base_in_float32_fit_the_base_in_16_bits(served_checkpoint, tmp_path):
    """As a run on a CPU saves them that starts from a bfloat16 model."""
    lora = {"rank": 3, "targets": ["*"]}
    model = ModelConfig(**{**MODEL, "lora": lora})
    rng = np.random.default_rng(0)
    values = {name: rng.normal(0, 0.3, shape) for name, shape in parameter_shapes(model).items()}
    halves = {name: to_bfloat16(value.astype(np.float32)) for name, value in values.items()}
    frozen = {name: value for name, value in halves.items() if ".lora." not in name}
    with_adapters = {name: from_bfloat16(value) for name, value in halves.items()}

    base = save(tmp_path / "base", "BF16", frozen, {**MODEL})
    whole = save(tmp_path / "whole", "F32", with_adapters, model.model_dump(mode="json"))
    assert len(read_adapters(whole, base).tensors) == len(values) - len(frozen)
    next(iter(frozen.values()))[:1] ^= 1
    with pytest.raises(CheckpointError, match="over other weights"):
        read_adapters(whole, save(tmp_path / "other", "BF16", frozen, {**MODEL}))
