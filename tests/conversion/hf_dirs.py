"""Hugging Face directories for tests, made from the golden models without transformers."""

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.model_only import read_ppfleetx
from ppfleetx.checkpoint.weights import fitted
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.compare_logits import our_logits
from ppfleetx.conversion.convert import Conversion, check_logits, convert
from ppfleetx.conversion.huggingface.config_export import differences
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.directory import read_hf, write_hf
from ppfleetx.conversion.huggingface.tensor_mapping import rules
from ppfleetx.data.tokenizer.json_files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.stage import canonical_parameters
from tests.helpers.hf_weights import hf_to_canonical
from tests.models.gpt_builders import assign, build, load_golden

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def golden(name):
    """config.json and tensors by Hugging Face's names."""
    config, arrays = load_golden(name)
    return config, {key.removeprefix("weight/"): value for key, value in arrays.items() if "weight/" in key}


def write(directory, name, *, dtype=None, shards=1, **changes):
    """One golden model as a directory; `changes` are keys of its config.json."""
    directory.mkdir(parents=True)
    config, tensors = golden(name)
    if dtype is not None:
        tensors = {key: value.astype(dtype) for key, value in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 5} | changes))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "max_length": 77}))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def lazy(arrays):
    """Tensors of 32 bits, by name."""
    return {name: LazyTensor("F32", array.shape, lambda array=array: array) for name, array in arrays.items()}


def random_tensors(model):
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(model)
    return lazy({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})


def write_tokenizer(directory, eos="<|endoftext|>"):
    """A tokenizer of single bytes."""
    vocab = {character: number for number, character in enumerate([*BYTE_CHARACTERS, eos])}
    Tokenizer(make_definition(vocab, [], [eos]), eod_token=eos).save(directory)


def there_and_back(source, root, tokens, expected, *, close, seen=slice(None)):
    """Convert a directory to ours and back, and write it once more without its config.json: logits are those
    that transformers computed (of the tokens that are ``seen``), tensors and keys those of the source.
    Returns the config.json that was made."""
    there = Conversion("hf", "ppfleetx", source, root / "ours")
    assert check_logits(there, convert(there)) < close
    weights = read_ppfleetx(root / "ours")
    model = ModelConfig(**weights.model)
    logits = our_logits(weights, model, tokens)
    np.testing.assert_allclose(logits[seen], expected[seen], rtol=0, atol=close)

    back = Conversion("ppfleetx", "hf", root / "ours", root / "back")
    convert(back)
    assert check_logits(back, root / "back") < close
    tensors = {
        name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    if model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    found = load_file(root / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, value in found.items():
        np.testing.assert_array_equal(value, tensors[key], err_msg=key)
    before, after = (json.loads((place / "config.json").read_text()) for place in (source, root / "back"))
    for key in before.keys() - {"dtype", "torch_dtype"}:
        assert after[key] == before[key], key

    write_hf(fitted(weights, model), model, root / "made")
    made = json.loads((root / "made" / "config.json").read_text())
    assert not differences(made, model)
    again = read_hf(root / "made")
    np.testing.assert_array_equal(our_logits(again, ModelConfig(**again.model), tokens), logits)
    return made


def assert_loss_and_gradients(config, weights, tokens, labels, loss, gradients):
    """Our network computes the mean loss of the labels that are not -100, and its gradients by Hugging
    Face's names."""
    model = build(ModelConfig(**model_keys(config) | NO_DROPOUT))
    canonical = dict(hf_to_canonical(config, weights.__getitem__))
    assert canonical.keys() == canonical_parameters(model).keys()
    for key, value in canonical.items():
        assign(model, key, value)
    mask = paddle.to_tensor((labels != -100).astype(np.float32))
    logits = model(paddle.to_tensor(tokens))
    found = token_loss(logits, paddle.to_tensor(np.maximum(labels, 0)), mask, config["vocab_size"]).loss
    found = found / mask.sum()
    found.backward()
    assert found.item() == pytest.approx(float(loss), rel=1e-6)
    parameters, compared = canonical_parameters(model), 0
    for rule in rules(config):
        for index, theirs in enumerate(rule.theirs):
            if theirs in gradients:
                ours = rule.split(parameters[rule.ours].grad.numpy(), index)
                np.testing.assert_allclose(ours, gradients[theirs], rtol=1e-3, atol=1e-6, err_msg=theirs)
                compared += 1
    assert compared == len(gradients) >= 3
