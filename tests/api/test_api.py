"""The Python API: what it gives, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import ppfleetx
from ppfleetx.api.config_arguments import config_source, settings_of
from ppfleetx.api.mindformers_gpt2 import _is_text
from ppfleetx.api.model import stream_of
from ppfleetx.api.trainer import corpus_prefix
from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.config.errors import CheckpointError, ConfigError, DataError
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.safetensors_file import read_safetensors, write_sharded
from ppfleetx.data.indexed_dataset import IndexedDataset
from ppfleetx.pipeline import pipeline
from ppfleetx.trainer import Trainer
from tests.conversion import hf_dirs
from tests.conversion.test_fleetx import theirs

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"decode_strategy": "greedy_search", "max_dec_len": 6}


@pytest.fixture(scope="module")
def model(place: Path) -> ppfleetx.GPT:
    return ppfleetx.load(place / "output", overrides={"Global.device": "cpu"})


def test_the_import_is_quick_and_lists_its_names() -> None:
    program = (
        "import sys, ppfleetx; assert set(ppfleetx.__all__) <= set(dir(ppfleetx))\n"
        "slow = {'paddle', 'numpy', 'pydantic'} & set(sys.modules); assert not slow, slow\n"
        "for name in ppfleetx.__all__: getattr(ppfleetx, name)\n"
        "assert 'paddle' not in sys.modules\n"
        "try: ppfleetx.nothing\nexcept AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "has no attribute 'nothing'" in done.stdout


def test_generation_takes_texts_ids_and_batches(model: ppfleetx.GPT) -> None:
    one = model.generate("The quick", **GREEDY)
    assert len(one.ids) == 6 and one.finish_reason == "length"
    ids = model.tokenizer.encode_prompt("The quick")
    assert model.generate(ids, **GREEDY) == model.generate(np.array(ids), **GREEDY) == one
    both = model.generate(["The quick", "def"], **GREEDY)
    assert both[0].text == one.text and len(both) == 2
    several = model.generate(["The", "def"], num_return_sequences=3, seed=1)
    assert [len(each) for each in several] == [3, 3]
    assert several == model.generate(["The", "def"], num_return_sequences=3, seed=1)
    assert len(model.generate("The").ids) <= 6  # what the checkpoint says


def test_a_seed_comes_from_the_call_else_from_the_configuration(place: Path) -> None:
    def texts(overrides: dict[str, Any], **options: Any) -> str:
        cfg = ppfleetx.load_config(place / "output", ["Global.device=cpu", *settings_of(overrides)])
        loaded = ppfleetx.GPT(cfg, model.network, model.tokenizer)
        return loaded.generate("The quick", max_dec_len=8, **options).text

    model = ppfleetx.load(place / "output", overrides={"Global.device": "cpu"})
    seven, eight = (texts({}, seed=seed) for seed in (7, np.int64(8)))
    assert len({seven, eight, texts({})}) == 3
    for key in ("Generation.seed", "Global.seed"):
        assert texts({key: 7}) == seven
        assert texts({key: 7}, seed=8) == eight
    assert texts({"Generation.seed": 8, "Global.seed": 7}) == eight


@pytest.mark.parametrize(
    "prompts",
    [None, 3, [1, 2.5], [[1, 2], [3.0]], [1, "a"], b"ab", {"a": 1}, [True], np.ones(2), paddle.ones([1])],
)
def test_what_is_no_prompt_is_refused(model: ppfleetx.GPT, prompts: Any) -> None:
    with pytest.raises(DataError, match="prompt"):
        model.generate(prompts, **GREEDY)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"num_beams": 3}, "num_beams"),
        ({"num_beams": 3, "num_return_sequences": 3}, "num_beams"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"decode_strategy": "greedy_search", "temperature": 0.5}, "temperature"),
        ({"decode_strategy": "beam_search", "num_beams": 2, "top_k": 3}, "top_k"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    model: ppfleetx.GPT, options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as error:
        model.generate("The quick", **options)
    assert error.value.key == key
    with pytest.raises(ConfigError):
        next(model.generate("The quick", stream=True, **options))


def test_options_at_the_value_that_changes_nothing_are_taken(model: ppfleetx.GPT) -> None:
    one = model.generate("The quick", **GREEDY)
    assert model.generate("The quick", num_beams=1, top_k=0, temperature=1.0, seed=3, **GREEDY) == one
    assert model.generate("The quick", **GREEDY | {"temperature": 0}) == one  # which means the same


def test_without_a_tokenizer_ids_are_continued(model: ppfleetx.GPT) -> None:
    bare = ppfleetx.GPT(model.cfg, model.network, None)
    ids = model.tokenizer.encode_prompt("The quick")
    options = {**GREEDY, "eos_token_id": model.tokenizer.eod_id}
    made = bare.generate(ids, **options)
    assert made.ids == model.generate(ids, **options).ids and made.text == ""
    both = bare.generate(np.array([ids, ids]), **options)
    assert [each.ids for each in both] == [made.ids] * 2
    assert bare.generate(paddle.to_tensor(ids), **options) == made
    for call, error, rule in (
        (lambda: bare.generate("The"), ConfigError, "Data.tokenizer"),
        (lambda: bare.generate(ids, stop="x"), ConfigError, "Generation.stop"),
        (lambda: bare.generate(ids, stream=True), ConfigError, "Data.tokenizer"),
        (lambda: bare.generate([model.cfg.Model.vocab_size]), DataError, "token id 512"),
        (lambda: bare.generate([[]]), DataError, "no token ids"),
    ):
        with pytest.raises(error, match=rule):
            call()


def test_streams_hold_the_same_text(model: ppfleetx.GPT) -> None:
    one = model.generate("The quick", **GREEDY)
    assert "".join(model.generate("The quick", stream=True, **GREEDY)) == one.text
    texts = {0: "", 1: ""}
    for prompt, copy, piece in model.generate(["The quick", "def"], stream=True, **GREEDY):
        assert copy == 0
        texts[prompt] += piece
    assert texts[0] == one.text
    with pytest.raises(ConfigError, match="max_dec_len"):
        next(model.generate("The", stream=True, max_dec_len=1000))


def test_a_stream_that_is_dropped_ends_its_generation() -> None:
    told: list[int] = []

    def generate(on_text: Any) -> None:
        for number in range(1_000_000):
            told.append(number)
            on_text(0, 0, "x")

    stream = stream_of(generate)
    assert next(stream) == (0, 0, "x")
    stream.close()
    assert len(told) < 1_000_000


def test_logits_and_loss_are_those_of_the_network(model: ppfleetx.GPT) -> None:
    ids = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    logits = model(ids)
    assert logits.shape == [2, 4, 512] and logits.dtype == paddle.float32
    np.testing.assert_allclose(model([1, 2, 3, 4]).numpy()[0], logits.numpy()[0], atol=1e-5)
    scores = logits.numpy().astype(np.float64)[:, :-1]
    log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    by_hand = -np.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean()
    assert model.loss(paddle.to_tensor(ids)).item() == pytest.approx(by_hand, rel=1e-5)
    model.train().loss(ids).backward()
    assert all(parameter.grad is not None for _, parameter in model.eval().named_parameters())
    model.network.clear_gradients()


@pytest.mark.parametrize(
    ("tokens", "rule"),
    [
        ([[1, 512]], "token id 512 is outside the model's vocabulary"),
        ([[-1, 2]], "token id -1"),
        ([list(range(65))], "65 tokens are more than the model's 64 positions"),
        ([[1.5, 2.0]], r"ids \[b, s\]"),
        ([], r"ids \[b, s\]"),
        ([[1, 2], [3]], "of one length"),
    ],
)
def test_wrong_tokens_are_refused(model: ppfleetx.GPT, tokens: Any, rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        model(tokens)


@pytest.mark.parametrize("name", ["debug/gpt_nano", "gpt/pretrain_gpt_1.3B_dp8"])
def test_a_loaded_configuration_can_be_given_in_place_of_a_file(name: str) -> None:
    cfg = ppfleetx.load_config(name)
    again = ppfleetx.load_config(config_source(cfg), world_size=cfg.plan.world_size)
    assert again.model_dump() == cfg.model_dump() and again.derived == cfg.derived


def trainer_of_chats(mode: str) -> ppfleetx.Trainer:
    chats = {f"Data.{mode}.dataset.name": "ChatDataset", f"Data.{mode}.dataset.split": "dev"}
    return ppfleetx.Trainer("debug/gpt_nano", chats, train_data=["a"], tokenizer="tokenizer")


def test_what_is_refused(model: ppfleetx.GPT, here: Path) -> None:
    for call, error, rule in (
        (lambda: ppfleetx.load("nowhere"), CheckpointError, "there is no directory nowhere"),
        (lambda: ppfleetx.load("tokenizer"), CheckpointError, "no complete checkpoint"),
        (lambda: ppfleetx.GPT2LMHeadModel.from_pretrained("gpt2"), CheckpointError, "directory gpt2"),
        (lambda: ppfleetx.GPT2Tokenizer.from_pretrained("gpt2"), DataError, "no tokenizer at gpt2"),
        (lambda: model.generate("x", max_length=3), ConfigError, "max_length"),
        (lambda: model.generate("x", prompt="y"), ConfigError, "first argument"),
        (lambda: model.generate("x", do_sample=True), ConfigError, r"Did you mean decode_strategy\?"),
        (lambda: model.generate("x", max_tokens=3), ConfigError, r"Did you mean max_dec_len\?"),
        (
            lambda: model.generate("x", stream=True, num_return_sequences=2),
            ConfigError,
            "num_return_sequences = 2: .* could not be told apart",
        ),
        (lambda: model.loss([[1]]), DataError, "nothing to predict"),
        (lambda: model.save("output"), CheckpointError, "exists already"),
        (lambda: model.to_huggingface("output"), CheckpointError, "not empty|empty directory"),
        (lambda: pipeline("translation", "output"), ConfigError, "the only task here"),
        (lambda: pipeline("text_generation", "output", beams=3), ConfigError, "no such option"),
        (lambda: pipeline("text_generation", model)("x", max_length=1), DataError, "nothing is left"),
        (lambda: pipeline("text_generation", model)(None), DataError, "prompts are a text"),
        (lambda: pipeline("text_generation", model)([[1, 2]]), DataError, "prompts are a text"),
        (lambda: Trainer(model="gpt2"), ConfigError, "there is no directory gpt2"),
        (lambda: Trainer(model="output").train(), ConfigError, "training needs train_dataset"),
        (lambda: Trainer(model="output").finetune(), ConfigError, "training needs train_dataset"),
        (lambda: Trainer(model="output").finetune("nowhere"), CheckpointError, "directory nowhere"),
        (lambda: Trainer(model="output").finetune(True), ConfigError, "finetune_checkpoint = True"),
        (lambda: Trainer(model="debug/gpt_nano").finetune(), ConfigError, "finetune_checkpoint"),
        (lambda: Trainer(model="output").finetune(auto_trans_ckpt=False), ConfigError, "auto_trans_ckpt"),
        (lambda: Trainer(model="output").predict(), ConfigError, "give input_data"),
        (lambda: ppfleetx.Trainer("debug/gpt_nano", {"Engine.max_step": 3}), ConfigError, "max_steps"),
        (lambda: ppfleetx.Trainer("debug/gpt_nano", train_data=["a"]), DataError, "texts need a tokenizer"),
        (lambda: ppfleetx.Trainer("debug/gpt_nano", [3]), ConfigError, "an override is a text"),
        (
            lambda: ppfleetx.Trainer("debug/gpt_nano", callbacks=[ppfleetx.Callback]),
            ConfigError,
            r"give Callback\(\)",
        ),
        *(
            (
                partial(trainer_of_chats, mode),
                ConfigError,
                f"Data.{mode}.dataset.name = 'ChatDataset': train_data are texts",
            )
            for mode in ("Train", "Eval")
        ),
    ):
        with pytest.raises(error, match=rule):
            call()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": [5, 7], "bos_token_id": 3},
        {"model_type": "mistral", "sliding_window": 4096},
    ],
)
def test_what_huggingface_gave_it_gets_back(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """The same files as ``ppfleetx convert`` makes, which keeps what it was given."""
    source = tmp_path / "hf"
    source.mkdir()
    config, tensors = hf_dirs.golden("hf_llama")
    stored = {
        name: LazyTensor("F32", one.shape, lambda one=one: one).cast(kind) for name, one in tensors.items()
    }
    write_sharded(source, stored, max_bytes=1 << 30, metadata={"format": "pt"})
    said = {key: value for key, value in (config | changes).items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(said))
    (source / "generation_config.json").write_text(
        '{"eos_token_id": [5, 7], "min_p": 0.1, "do_sample": true}'
    )
    hf_dirs.write_tokenizer(source)
    convert(Conversion("hf", "hf", source, tmp_path / "converted"))
    model = ppfleetx.load(source, overrides={"Global.device": "cpu"})
    model.to_huggingface(tmp_path / "direct")
    saved = model.save(tmp_path / "saved")
    convert(Conversion("ppfleetx", "hf", saved, tmp_path / "by_way"))
    for directory in ("direct", "by_way"):
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            kept, wanted = (tmp_path / where / name for where in (directory, "converted"))
            assert kept.read_bytes() == wanted.read_bytes(), (directory, name)
    found = read_safetensors(tmp_path / "direct/model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {kind}
    if kind != "F32":  # numbers that 16 bits do not hold are not rounded behind the user's back
        name, parameter = next(iter(model.named_parameters()))
        parameter.set_value(parameter + 1e-6)
        weights = read_ppfleetx(model.save(tmp_path / "changed"))
        np.testing.assert_array_equal(weights.tensors[name].read(), parameter.numpy())


def test_a_module_takes_fleetx_weights_and_nothing_less(model: ppfleetx.GPT, here: Path) -> None:
    module = ppfleetx.build_module(ppfleetx.load_config("output", ["Global.device=cpu"]))
    module.model.eval()
    with pytest.raises(ConfigError, match="has no weights yet"):
        module.generate("The quick")
    weights = {theirs(name): parameter.numpy() for name, parameter in model.named_parameters()}
    table = "gpt.embeddings.word_embeddings.weight"
    padded = np.concatenate([weights[table], np.ones((128, 64), np.float32)])
    for wrong, rule in (
        ({k: v for k, v in weights.items() if k != table}, "word_embeddings.weight is missing"),
        ({**weights, "extra": padded}, "extra is unknown"),
        ({**weights, table: padded[:, :3]}, r"has the shape \[640, 3\]"),
    ):
        with pytest.raises(CheckpointError, match=rule):
            module.model.set_state_dict(wrong)
    with pytest.raises(ConfigError, match="use_structured_name"):
        module.model.set_state_dict(weights, use_structured_name=False)
    module.model.set_state_dict({**weights, table: padded})
    [text] = module.generate("The quick", **GREEDY)
    assert text == "The quick" + model.generate("The quick", **GREEDY).text


def test_corpora_of_all_kinds_are_the_same(here: Path, tmp_path: Path) -> None:
    tokenizer = ppfleetx.Tokenizer.load("tokenizer")
    texts = ["one text", "", "another"]
    (tmp_path / "lines.jsonl").write_text('{"text": "one text"}\n{"text": "another"}\n')

    class Records(list):
        """What ``datasets.Dataset`` gives one after the other."""

    records = Records({"text": text} for text in texts)
    found = {corpus_prefix(data, tokenizer, tmp_path)
             for data in (texts, iter(texts), tmp_path / "lines.jsonl", records)}  # fmt: skip
    [prefix] = found
    corpus = IndexedDataset(prefix)
    end = tokenizer.eod_token
    assert tokenizer.decode(corpus.flat(0, corpus.num_tokens)) == f"one text{end}another{end}"
    assert corpus_prefix(prefix, None, tmp_path) == prefix
    for wrong, rule in (
        ([], "hold no text"),
        ([3], "entry 0"),
        (3, "training data are"),
        ("no.txt", "no such"),
    ):
        with pytest.raises(DataError, match=rule):
            corpus_prefix(wrong, tokenizer, tmp_path)


def test_the_tokenizer_pads_cuts_and_refuses(here: Path) -> None:
    tokenizer = ppfleetx.GPT2Tokenizer.from_pretrained("output")
    ids, pad = tokenizer.tokenizer.encode("hello world"), tokenizer.pad_token_id
    assert tokenizer("hello world")["input_ids"] == ids
    assert tokenizer("hello world", add_special_tokens=True)["input_ids"] == [pad, *ids, pad]
    padded = tokenizer(["hello world", "a"], padding="max_length", max_length=12, return_tensors="np")
    assert padded["input_ids"].shape == (2, 12) and padded["attention_mask"][0].sum() == len(ids)
    assert list(padded["input_ids"][0]) == ids + [pad] * (12 - len(ids))
    cut = tokenizer("hello world", max_length=3, truncation=True)
    assert cut["input_ids"] == ids[:3] and tokenizer.decode([ids, ids]) == ["hello world"] * 2
    for options, rule in (
        ({"max_length": 2}, "truncation=True cuts it"),
        ({"padding": "max_length"}, "needs max_length"),
        ({"padding": "longest"}, "padding is"),
        ({"return_tensors": "tf"}, "return_tensors one of"),
    ):
        with pytest.raises(DataError, match=rule):
            tokenizer("hello world", **options)
    with pytest.raises(DataError, match="several lengths"):
        tokenizer(["hello world", "a"])


def test_padding_does_not_count_in_the_loss(here: Path) -> None:
    model = ppfleetx.GPT2LMHeadModel.from_pretrained("output")
    tokenizer = ppfleetx.GPT2Tokenizer.from_pretrained("output")
    short = tokenizer(["hello world"], return_tensors="np")["input_ids"]
    long = tokenizer(["hello world"], padding="max_length", max_length=20, return_tensors="np")["input_ids"]
    model.set_train(True).model.network.eval()  # without dropout
    assert model(long).item() == pytest.approx(model(short).item(), rel=1e-5)
    for wrong in (model.config.vocab_size, -1, -100, 2**40):  # as the last label, which is no input
        with pytest.raises(DataError, match=f"token id {wrong} is outside"):
            model([[1, 2, wrong]])
    assert _is_text(np.array([[9, 1, 9, 2, 9, 9]]), 9).tolist() == [[True] * 4 + [False] * 2]


def test_max_length_counts_the_prompt(here: Path) -> None:
    task = pipeline("text_generation", model="output", max_length=12, do_sample=False)
    prompt = "The quick"
    [first] = task(prompt)
    [text] = first["text_generation_text"]
    tokenizer = ppfleetx.Tokenizer.load("tokenizer")
    model = ppfleetx.load("output")
    left = 12 - len(tokenizer.encode(prompt))
    assert text == prompt + model.generate(prompt, decode_strategy="greedy_search", max_dec_len=left).text
    assert [first, first] == task([prompt, prompt])
    assert first == task(prompt, top_k=3)[0], "as in MindFormers, which passes over it"


def test_options_of_sampling_need_a_pipeline_that_samples(model: ppfleetx.GPT, here: Path) -> None:
    greedy = ppfleetx.load("output", overrides={"Generation.decode_strategy": "greedy_search"})
    task = pipeline("text_generation", greedy, temperature=0.5)
    with pytest.raises(ConfigError, match="do_sample=True") as error:
        task("The quick")
    assert error.value.key == "temperature"
    assert task("The quick", do_sample=True) == pipeline("text_generation", model, temperature=0.5)(
        "The quick"
    )


def test_a_pipeline_leaves_the_model_it_is_given_alone(model: ppfleetx.GPT, here: Path) -> None:
    own, other = model.tokenizer, ppfleetx.Tokenizer.load("tokenizer")
    text = model.generate("The quick", max_dec_len=4).text
    generator = model.generator
    task = pipeline("text_generation", model, tokenizer=other)
    assert task.model.tokenizer is other and task.model.network is model.network
    assert model.tokenizer is own and model.generator is generator
    assert task("The quick", max_length=12) and model.generate("The quick", max_dec_len=4).text == text


def test_a_model_with_adapters_is_kept_and_converted(here: Path, tmp_path: Path) -> None:
    changes = {
        "Engine.max_steps": 2,
        "Model.lora": {"rank": 4},
        "Optimizer.lr": {"max_lr": 0.05, "warmup_steps": 0},
    }
    trainer = ppfleetx.Trainer("output", changes, train_data="text.txt", output_dir=tmp_path / "run").fit()
    ids = [1, 2, 3, 4]
    logits = trainer.model(ids)
    assert abs(logits - ppfleetx.load("output")(ids)).max().item() > 1e-3
    ppfleetx.load(tmp_path / "run").save(tmp_path / "saved")
    trainer.model.to_huggingface(tmp_path / "hf")
    for place in ("saved", "hf"):
        assert abs(logits - ppfleetx.load(tmp_path / place)(ids)).max().item() < 1e-5, place


def test_evaluation_on_data_with_names(here: Path, tmp_path: Path) -> None:
    changes = {"Engine.max_steps": 2, "Engine.eval_freq": 2, "Engine.eval_iters": 1}
    sets = {"text": "text.txt", "list": ["another text, said again and again\n" * 40]}
    run = tmp_path / "run"
    trainer = ppfleetx.Trainer("output", changes, train_data="text.txt", eval_data=sets, output_dir=run).fit()
    told = {record["set"]: record["loss"] for record in trainer.history if record["kind"] == "eval"}
    records = trainer.evaluate()
    assert {name: record.loss for name, record in records.items()} == pytest.approx(told, rel=1e-6)
    assert list(records) == ["text", "list"] and told["text"] != told["list"]


def test_a_continued_run_evaluates_what_it_trained(here: Path, tmp_path: Path) -> None:
    """And not the checkpoint that it started from."""
    changes = {"Engine.max_steps": 2, "Engine.eval_freq": 2, "Engine.eval_iters": 1}
    data = {"train_data": "text.txt", "eval_data": "text.txt"}
    ppfleetx.Trainer("output", changes, **data, output_dir=tmp_path / "first").fit()
    changes |= {"Engine.max_steps": 4, "Engine.save_load.lr_schedule": "config"}
    changes["Engine.save_load.ckpt_dir"] = str(tmp_path / "first")
    trainer = ppfleetx.Trainer("output", changes, **data, output_dir=tmp_path / "second").fit()
    told = [record["loss"] for record in trainer.history if record["kind"] == "eval"]
    assert trainer.evaluate().loss == pytest.approx(told[-1], rel=1e-6)


def test_finetuning_as_mindformers_does_it(here: Path, tmp_path: Path) -> None:
    """From the weights that are named, at step 0, with the defaults of `ppfleetx finetune`."""
    args = {"Engine.max_steps": 2, "Engine.eval_freq": 0}
    trainer = Trainer(model="output", train_dataset="text.txt", args=args, output_dir=tmp_path / "run")
    trainer.finetune("output", auto_trans_ckpt=True)
    native = trainer._trainer
    assert [record["step"] for record in native.history] == [1, 2]
    assert native.cfg.Engine.save_load.init_from is not None and native.cfg.Optimizer.lr.max_lr == 5e-5
    assert trainer.predict(input_data="The quick", max_length=12)
    with pytest.raises(ConfigError, match="102 tokens"):  # and not "File name too long"
        trainer.predict(input_data="fox " * 100, max_length=420)
