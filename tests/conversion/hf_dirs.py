"""Hugging Face directories for tests, made from the golden models without transformers."""

import json

from safetensors.numpy import save_file

from ppfleetx.data.tokenizer.files import BYTE_CHARACTERS, make_definition
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.models.gpt_builders import load_golden


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


def write_tokenizer(directory, eos="<|endoftext|>"):
    """A tokenizer of single bytes."""
    vocab = {character: number for number, character in enumerate([*BYTE_CHARACTERS, eos])}
    Tokenizer(make_definition(vocab, [], [eos]), eod_token=eos).save(directory)
