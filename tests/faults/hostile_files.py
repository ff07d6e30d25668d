"""Foreign files that are damaged, lie or attack, by the hundred: what `hostile_campaign` gives to the tools.

All of them are made here, or by the tables of the tests of each format; none comes from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.checkpoints import RANK, save
from tests.checkpoint.test_lying_manifests import LIES as MANIFESTS
from tests.checkpoint.test_lying_manifests import reseal, saved
from tests.conversion import hf_dirs
from tests.conversion.test_odd_hf import ODD_VALUES
from tests.conversion.test_pickles import attacks
from tests.conversion.test_safetensors_file import LIES as HEADERS
from tests.conversion.test_safetensors_file import file_of
from tests.data.tokenizer.test_odd_tokenizers import ODD as TOKENIZERS
from tests.faults.hostile_builders import (
    GOLDENS,
    SPECIAL,
    Make,
    alone,
    archive,
    damage,
    fleetx,
    fleetx_tensors,
    hf,
    hf_pickled,
    in_bin,
    in_rank,
    instead,
    megatron,
    ours,
    put_in_place,
    repeated,
    tensor,
    write_torch,
)

HF, FLEETX, MEGATRON, OURS, TOKENIZER = "hf", "fleetx", "megatron", "ours", "tokenizer"


@dataclass(frozen=True)
class Case:
    """One hostile directory.

    Attributes:
        name: for the report.
        make: writes it into an empty directory.
        kind: what it pretends to be: HF, FLEETX, MEGATRON, OURS or TOKENIZER.
        may_pass: whether the damage may be of no importance, so that a tool may also accept it.
        is_sound: nothing is wrong with it, and the tools have to accept it.
        is_readable: only who knows the model can tell; the file itself, and each tensor in it, is whole.
    """

    name: str
    make: Make
    kind: str
    may_pass: bool = False
    is_sound: bool = False
    is_readable: bool = False


def all_cases(canary: Path, seed: int) -> list[Case]:
    """Every case; what attacks tries to create the file ``canary``."""
    return [
        *_sound(),
        *_headers(),
        *_configs(),
        *_indices(),
        *_pickles(canary),
        *_archives(),
        *_megatron(),
        *_fleetx(),
        *_manifests(),
        *_tokenizers(),
        *_no_files(),
        *_damaged(random.Random(seed)),
    ]


# ---- the cases


def _sound() -> Iterator[Case]:
    for kind, make in ((HF, hf), (HF, hf_pickled), (FLEETX, fleetx), (MEGATRON, megatron), (OURS, ours)):
        yield Case(f"sound: {make.__name__}", make, kind, is_sound=True)
    yield Case("sound: tokenizer", hf_dirs.write_tokenizer, TOKENIZER, is_sound=True)


def _headers() -> Iterator[Case]:
    def make(header: Any) -> Make:
        def write(directory: Path) -> None:
            hf(directory)
            file_of(directory / "model.safetensors", header)

        return write

    for name, header in HEADERS.items():
        yield Case(f"safetensors: {name}", make(header), HF)


def _configs() -> Iterator[Case]:
    for name, changes, _ in ODD_VALUES:
        yield Case(f"config.json: {changes}"[:70], lambda d, n=name, c=changes: hf(d, n, **c), HF)
    for name, content in {
        "nested": b'{"model_type": ' + b"[" * 200_000,
        "wide": b'{"a": [' + b"1," * 3_000_000 + b"1]}",
        "a key twice": b'{"model_type": "gpt2", "model_type": "gpt2"}',
        "NaN": b'{"model_type": NaN}',
        "a list": b"[]",
        "an integer of 5000 digits": b'{"n_embd": ' + b"9" * 5000 + b"}",
        "latin-1": b'{"a": "\xe9"}',
    }.items():
        yield Case(f"config.json: {name}", instead(hf, "config.json", content), HF)


def _indices() -> Iterator[Case]:
    for name, where in {
        "a file elsewhere": {"a": "../../x"},
        "the directory": {"a": "."},
        "numbers": {"a": 5},
        "a missing shard": {"a": "model-00001-of-00002.safetensors"},
        "a device": {"a": "/dev/zero"},
        "a long name": {"a": "x" * 300},
        "a zero byte": {"a": "x\0y"},
        "a list": [],
    }.items():
        content = json.dumps({"weight_map": where}).encode()
        yield Case(f"index: {name}", instead(hf, "model.safetensors.index.json", content), HF)


def _pickles(canary: Path) -> Iterator[Case]:
    """What a pickle must not do, wherever one is read."""
    for name, content in attacks(canary).items():
        yield Case(f"pdparams, attack: {name}", alone("model.pdparams", content), FLEETX)
        yield Case(f"bin, attack: {name}", lambda d, c=content: in_bin(d, c), HF)
        yield Case(f"pt, attack: {name}", lambda d, c=content: in_rank(d, c), MEGATRON)


def _archives() -> Iterator[Case]:
    good, small = tensor((2, 3)) + b".", [("archive/data/0", bytes(24))]
    for name, write in {
        "a missing storage": lambda p: archive(p, good),
        "a storage too small": lambda p: archive(p, good, [("archive/data/0", bytes(20))]),
        "strides out of range": lambda p: archive(p, tensor((2, 3), stride=(9, 9), count=6) + b".", small),
        "an offset out of range": lambda p: archive(p, tensor((2, 3), offset=10, count=6) + b".", small),
        "a negative shape": lambda p: archive(p, tensor((-2, 3), count=6) + b".", small),
        "one element for ever": lambda p: archive(p, tensor((1 << 40,), stride=(0,), count=1) + b".", small),
        "lzma": lambda p: archive(p, good, small, compression=zipfile.ZIP_LZMA),
        "no state dict": lambda p: archive(p, b"]."),
        "no data.pkl": lambda p: repeated(p, "other", b"x", 1),
        "cut off": lambda p: (write_torch(p, {"a": np.zeros(99)}), os.truncate(p, p.stat().st_size - 40)),
        "a saved module": lambda p: shutil.copy(GOLDENS / "torch" / "module.bin", p),
        "another state dict": lambda p: shutil.copy(GOLDENS / "torch" / "legacy.bin", p),
        "a web page": lambda p: p.write_bytes(b"<!DOCTYPE html><html>" + b" " * 5000),
        "a pointer of Git LFS": lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "noise": lambda p: p.write_bytes(random.Random(0).randbytes(20_000)),
        "two magic numbers": lambda p: p.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) * 5),
    }.items():  # fmt: skip
        yield Case(f"bin, {name}", lambda d, w=write: (hf_pickled(d, {}), w(d / "pytorch_model.bin")), HF)


def _megatron() -> Iterator[Case]:
    network = {"num_layers": 2, "hidden_size": 60, "num_attention_heads": 4, "vocab_size": 97}
    for name, changes in {
        "7 heads of 60": {"num_attention_heads": 7},
        "a width as a text": {"hidden_size": "60"},
        "a width as a list": {"hidden_size": [60]},
        "no layer": {"num_layers": -1},
        "a billion layers": {"num_layers": 10**9},
        "a base of rotary positions as a text": {"rotary_base": "x"},
        "a huge width": {"hidden_size": 10**30},
        "an unknown position": {"position_embedding_type": ["rope"]},
    }.items():
        tree = {"model": {}, "args": argparse.Namespace(**network | changes)}
        yield Case(f"pt, args: {name}", lambda d, t=tree: in_rank(d, pickle.dumps(t, 2)), MEGATRON)
    for name, tree in {
        "an iteration before the first": {"iteration": -5},
        "an iteration as a text": {"iteration": "7"},
        "a version as a list": {"checkpoint_version": [3]},
        "a list for the model": {"model": []},
        "a list for the args": {"args": [1]},
    }.items():
        tree = {"model": {}, "args": argparse.Namespace(**network)} | tree
        yield Case(f"pt, {name}", lambda d, t=tree: in_rank(d, pickle.dumps(t, 2)), MEGATRON)
    for name, content in {
        "tracker: noise": b"\xff" * 50,
        "tracker: digits": b"9" * 90,
        "tracker: long": b"1" * 10**6,
    }.items():
        yield Case(name, instead(megatron, "latest_checkpointed_iteration.txt", content), MEGATRON)
    yield Case("distcp of Megatron-LM", alone("iter_0000001/__0_0.distcp", b"x" * 99), MEGATRON)
    yield Case("distcp beside a configuration", _distcp, HF)


def _distcp(directory: Path) -> None:
    hf(directory)
    (directory / "model.safetensors").rename(directory / "__0_0.distcp")


def _fleetx() -> Iterator[Case]:
    def ranks(first: Mapping[str, Any], second: Mapping[str, Any]) -> Make:
        def write(directory: Path) -> None:
            for rank, tree in enumerate((first, second)):
                place = directory / f"mp_{rank:02d}_sharding_00_pp_00"
                place.mkdir()
                (place / "model.pdparams").write_bytes(pickle.dumps(dict(tree), 4))

        return write

    sound = fleetx_tensors()
    name = "gpt.decoder.layers.0.linear1.weight"
    split = {key.replace("qkv_proj", "q_proj"): value for key, value in sound.items()}
    for what, tree in {
        "a tensor more": sound | {"gpt.decoder.layers.9.norm1.weight": np.zeros(3)},
        "layers without an end": sound | {f"gpt.decoder.layers.{'9' * 500}.norm1.weight": np.zeros(3)},
        "a scalar for a matrix": sound | {name: np.float32(1) * np.ones(())},
        "a name of a megabyte": sound | {"x" * 10**6: np.zeros(3)},
        "q without k and v": split,
        "texts": sound | {name: "text"},
    }.items():
        write = alone("model.pdparams", pickle.dumps(tree, 4))
        yield Case(f"pdparams, {what}", write, FLEETX, is_readable=True)
    for what, other in {
        "other shapes": sound | {name: np.zeros((5, 5), np.float32)},
        "scalars": {key: np.zeros(()) for key in sound},
        "fewer tensors": {name: sound[name]},
        "nothing": {},
    }.items():
        yield Case(f"ranks of FleetX, the second has {what}", ranks(sound, other), FLEETX)


def _manifests() -> Iterator[Case]:
    for name, (change, _) in MANIFESTS.items():
        yield Case(f"manifest: {name}", lambda d, c=change: reseal(saved(d), c), OURS)
    for name, state in {
        "progress of texts": {"train": {"step": "1", "consumed_samples": 0, "epoch": 0}},
        "progress of nothing": {"train": {}},
        "a huge step": {"train": {"step": 10**30, "consumed_samples": 0, "epoch": 0}},
    }.items():
        yield Case(f"manifest: {name}", lambda d, s=state: save(d, state=s), OURS, may_pass=True)


def _tokenizers() -> Iterator[Case]:
    for name, (content, _) in TOKENIZERS.items():
        whole = content if isinstance(content, str) else json.dumps(content)
        yield Case(f"tokenizer.json: {name}", alone("tokenizer.json", whole.encode()), TOKENIZER)
    for name, files in {
        "merges of three": {"vocab.json": b'{"a": 0}', "merges.txt": b"a b c\n"},
        "no merges": {"vocab.json": b'{"a": 0}'},
        "a list of tokens": {"vocab.json": b"[]", "merges.txt": b""},
        "merges that are no text": {"vocab.json": b'{"a": 0}', "merges.txt": b"\xff\xff"},
        "ids as texts": {"vocab.json": b'{"a": "0"}', "merges.txt": b""},
    }.items():
        yield Case(f"vocabulary: {name}", _files(files), TOKENIZER)


def _files(contents: Mapping[str, bytes]) -> Make:
    return lambda directory: [(directory / name).write_bytes(content) for name, content in contents.items()]


def _no_files() -> Iterator[Case]:
    """Directories, pipes, devices, loops, and files of no or of all bytes, where a file should be."""
    for make, kind, name in (
        (hf, HF, "config.json"),
        (hf, HF, "model.safetensors"),
        (hf_pickled, HF, "pytorch_model.bin"),
        (fleetx, FLEETX, "model.pdparams"),
        (megatron, MEGATRON, "iter_0000007/mp_rank_00_000/model_optim_rng.pt"),
        (megatron, MEGATRON, "latest_checkpointed_iteration.txt"),
        (hf_dirs.write_tokenizer, TOKENIZER, "tokenizer.json"),
        (ours, OURS, "epoch_0_step_1/manifest.json"),
        (ours, OURS, "epoch_0_step_1/COMPLETE"),
        (ours, OURS, f"epoch_0_step_1/{RANK}/model.safetensors"),
        (ours, OURS, "latest"),
    ):
        for what, put in SPECIAL.items():
            is_pointer = name == "latest" or name.startswith("latest_")  # without it, there is another way
            yield Case(f"{what} for {name}", put_in_place(make, name, put), kind, may_pass=is_pointer)


def _damaged(rng: random.Random) -> Iterator[Case]:
    """Bits flipped, bytes replaced, ends cut off, in files that were sound."""
    for make, kind, name in (
        (hf, HF, "config.json"),
        (hf, HF, "model.safetensors"),
        (hf_pickled, HF, "pytorch_model.bin"),
        (fleetx, FLEETX, "model.pdparams"),
        (megatron, MEGATRON, "iter_0000007/mp_rank_01_000/model_optim_rng.pt"),
        (hf_dirs.write_tokenizer, TOKENIZER, "tokenizer.json"),
    ):
        for number in range(6):
            seed = rng.randrange(1 << 30)

            def write(directory: Path, make: Make = make, name: str = name, seed: int = seed) -> None:
                make(directory)
                damage(directory / name, random.Random(seed))

            yield Case(f"damage {number} in {name}", write, kind, may_pass=True)
