"""Files of other programs that are damaged, lie or attack: what `hostile_campaign` gives to the tools.

Lies that one reader alone has to find are in the tests of that reader.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.slices import whole
from tests.checkpoint.checkpoints import RANK, save
from tests.conversion import hf_dirs
from tests.conversion.test_pickles import attacks
from tests.faults.harness import flipped
from tests.helpers.hf_weights import hf_to_canonical

GOLDENS = Path(__file__).parents[1] / "goldens"
HF, FLEETX, MEGATRON, OURS, TOKENIZER = "hf", "fleetx", "megatron", "ours", "tokenizer"
Make = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """One directory.

    Attributes:
        name: for the report.
        make: writes it into an empty directory.
        kind: what it pretends to be: HF, FLEETX, MEGATRON, OURS or TOKENIZER.
        may_pass: the damage may not matter, so a tool may also accept it.
        is_sound: nothing is wrong with it, and the tools have to accept it.
        is_readable: each tensor in it is whole; only who knows the model can tell that it is wrong.
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
        *_hugging_face(),
        *_attacks(canary),
        *_archives(),
        *_megatron(),
        *_fleetx(),
        *_manifests(),
        *_tokenizers(),
        *_misplaced(),
        *_damaged(random.Random(seed)),
    ]


# ---- sound directories, which are damaged below


def hf(directory: Path, name: str = "hf_gpt2", **changes: Any) -> None:
    """A small model of Hugging Face's with a tokenizer."""
    shutil.copytree(hf_dirs.write(directory / "made", name, **changes), directory, dirs_exist_ok=True)
    shutil.rmtree(directory / "made")
    hf_dirs.write_tokenizer(directory)


def hf_pickled(directory: Path, tensors: Mapping[str, np.ndarray] | None = None) -> None:
    """The same with pytorch_model.bin."""
    hf(directory)
    (directory / "model.safetensors").unlink()
    write_torch(directory / "pytorch_model.bin", tensors or hf_dirs.golden("hf_gpt2")[1])


def fleetx(directory: Path) -> None:
    """The same network as model.pdparams."""
    (directory / "model.pdparams").write_bytes(pickle.dumps(fleetx_tensors(), 4))


def fleetx_tensors() -> dict[str, np.ndarray]:
    """Tensors of the golden GPT-2 under FleetX's names."""
    config, arrays = hf_dirs.golden("hf_gpt2")
    names = (
        ("attention.", "self_attn."),
        (".qkv.", ".qkv_proj."),
        ("input_norm", "norm1"),
        ("mlp_norm", "norm2"),
        ("mlp.fc", "linear"),
        ("final_norm", "norm"),
        ("embedding.", "embeddings."),
    )
    renamed = {}
    for name, array in hf_to_canonical(config, arrays.__getitem__):
        for ours_, theirs in names:
            name = name.replace(ours_, theirs)
        renamed[f"gpt.{name}"] = array
    return renamed


def megatron(directory: Path) -> None:
    """The same network as PyTorch saved it for Megatron-LM."""
    shutil.copytree(GOLDENS / "megatron" / "gpt2_tp2_pp2", directory, dirs_exist_ok=True)


def ours(directory: Path) -> None:
    """A checkpoint of ours with a whole network."""
    config, arrays = hf_dirs.golden("hf_gpt2")
    tensors = [whole(name, array) for name, array in hf_to_canonical(config, arrays.__getitem__)]
    save(directory, tensors=tensors)


# ---- PyTorch's archives, without PyTorch


def write_torch(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A state dict as ``torch.save`` lays it out."""
    described, members = b"\x80\x02}(", []
    for number, (name, array) in enumerate(tensors.items()):
        described += b"X" + struct.pack("<I", len(name.encode())) + name.encode()
        described += tensor(array.shape, str(number).encode())
        members.append((f"archive/data/{number}", np.ascontiguousarray(array, "<f4").tobytes()))
    archive(path, described + b"u.", members)


def tensor(shape: tuple[int, ...], key: bytes = b"0", *, stride: Any = None, offset: int = 0) -> bytes:
    """Instructions that make a float32 tensor of a storage."""
    steps = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))] if stride is None else stride
    count = int(np.prod(shape))
    place = b"(S'storage'\nctorch\nFloatStorage\nS'%s'\nS'cpu'\nI%d\ntQI%d\n" % (key, count, offset)
    sizes = b"".join(
        b"(" + b"".join(b"I%d\n" % value for value in values) + b"t" for values in (shape, steps)
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + sizes + b"I00\nNtR"


def archive(path: Path, described: bytes | None, members: Any = ()) -> None:
    """A zip archive with ``data.pkl`` and further members."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        if described is not None:
            made.writestr("archive/data.pkl", described)
        for name, content in members:
            made.writestr(name, content)


# ---- one file in a directory


def alone(name: str, content: bytes) -> Make:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)

    return write


def instead(make: Make, name: str, put: bytes | Callable[[Path], Any]) -> Make:
    """A directory in which one file has other bytes, or something else in its place."""

    def write(directory: Path) -> None:
        make(directory)
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(put) if isinstance(put, bytes) else put(directory / name)

    return write


def in_bin(content: bytes) -> Make:
    return instead(lambda d: hf_pickled(d, {}), "pytorch_model.bin", lambda path: archive(path, content))


def in_rank(content: bytes) -> Make:
    def write(directory: Path) -> None:
        place = directory / "release" / "mp_rank_00"
        place.mkdir(parents=True)
        (directory / "latest_checkpointed_iteration.txt").write_text("release")
        archive(place / "model_optim_rng.pt", content)

    return write


# ---- the cases


def _sound() -> Iterator[Case]:
    for kind, make in ((HF, hf), (HF, hf_pickled), (FLEETX, fleetx), (MEGATRON, megatron), (OURS, ours)):
        yield Case(f"sound: {make.__name__}", make, kind, is_sound=True)
    yield Case("sound: tokenizer", hf_dirs.write_tokenizer, TOKENIZER, is_sound=True)


def _hugging_face() -> Iterator[Case]:
    for name, content in {
        "a key twice": b'{"model_type": "gpt2", "model_type": "gpt2"}',
        "NaN": b'{"model_type": NaN}',
        "a list": b"[]",
        "latin-1": b'{"a": "\xe9"}',
    }.items():
        yield Case(f"config.json: {name}", instead(hf, "config.json", content), HF)
    for name, where in {
        "a file elsewhere": {"a": "../../x"},
        "the directory": {"a": "."},
        "numbers": {"a": 5},
        "a missing shard": {"a": "model-00001-of-00002.safetensors"},
        "a list": [],
    }.items():
        content = json.dumps({"weight_map": where}).encode()
        yield Case(f"index: {name}", instead(hf, "model.safetensors.index.json", content), HF)
    renamed = lambda d: (hf(d), (d / "model.safetensors").rename(d / "__0_0.distcp"))  # noqa: E731
    yield Case("distcp beside a configuration", renamed, HF)


def _attacks(canary: Path) -> Iterator[Case]:
    """What a pickle must not do, wherever one is read."""
    for name, content in attacks(canary).items():
        yield Case(f"pdparams, attack: {name}", alone("model.pdparams", content), FLEETX)
        yield Case(f"bin, attack: {name}", in_bin(content), HF)
        yield Case(f"pt, attack: {name}", in_rank(content), MEGATRON)


def _archives() -> Iterator[Case]:
    good, small = tensor((2, 3)) + b".", [("archive/data/0", bytes(24))]
    for name, write in {
        "a missing storage": lambda p: archive(p, good),
        "a storage too small": lambda p: archive(p, good, [("archive/data/0", bytes(20))]),
        "strides out of range": lambda p: archive(p, tensor((2, 3), stride=(9, 9)) + b".", small),
        "an offset out of range": lambda p: archive(p, tensor((2, 3), offset=10) + b".", small),
        "no state dict": lambda p: archive(p, b"]."),
        "no data.pkl": lambda p: archive(p, None, [("archive/other", b"x")]),
        "cut off": lambda p: (write_torch(p, {"a": np.zeros(99)}), os.truncate(p, p.stat().st_size - 40)),
        "a saved module": lambda p: shutil.copy(GOLDENS / "torch" / "module.bin", p),
        "another state dict": lambda p: shutil.copy(GOLDENS / "torch" / "legacy.bin", p),
        "a web page": lambda p: p.write_bytes(b"<!DOCTYPE html><html>" + b" " * 5000),
        "a pointer of Git LFS": lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "noise": lambda p: p.write_bytes(random.Random(0).randbytes(20_000)),
    }.items():
        yield Case(f"bin, {name}", instead(lambda d: hf_pickled(d, {}), "pytorch_model.bin", write), HF)


def _megatron() -> Iterator[Case]:
    network = {"num_layers": 2, "hidden_size": 60, "num_attention_heads": 4, "vocab_size": 97}
    for name, changes in {
        "7 heads of 60": {"num_attention_heads": 7},
        "a width as a text": {"hidden_size": "60"},
        "no layer": {"num_layers": -1},
        "a billion layers": {"num_layers": 10**9},
        "an unknown position": {"position_embedding_type": ["rope"]},
    }.items():
        tree = {"model": {}, "args": argparse.Namespace(**network | changes)}
        yield Case(f"pt, args: {name}", in_rank(pickle.dumps(tree, 2)), MEGATRON)
    for name, tree in {
        "an iteration as a text": {"iteration": "7"},
        "a version as a list": {"checkpoint_version": [3]},
        "a list for the model": {"model": []},
        "a list for the args": {"args": [1]},
    }.items():
        tree = {"model": {}, "args": argparse.Namespace(**network)} | tree
        yield Case(f"pt, {name}", in_rank(pickle.dumps(tree, 2)), MEGATRON)
    for name, content in {"noise": b"\xff" * 50, "digits": b"9" * 90}.items():
        write = instead(megatron, "latest_checkpointed_iteration.txt", content)
        yield Case(f"tracker: {name}", write, MEGATRON)
    yield Case("distcp of Megatron-LM", alone("iter_0000001/__0_0.distcp", b"x" * 99), MEGATRON)


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
    for what, tree in {
        "a tensor more": sound | {"gpt.decoder.layers.9.norm1.weight": np.zeros(3)},
        "a scalar for a matrix": sound | {name: np.float32(1) * np.ones(())},
        "q without k and v": {key.replace("qkv_proj", "q_proj"): value for key, value in sound.items()},
        "texts": sound | {name: "text"},
    }.items():
        write = alone("model.pdparams", pickle.dumps(tree, 4))
        yield Case(f"pdparams, {what}", write, FLEETX, is_readable=True)
    for what, other in {
        "other shapes": sound | {name: np.zeros((5, 5), np.float32)},
        "fewer tensors": {name: sound[name]},
        "nothing": {},
    }.items():
        yield Case(f"ranks of FleetX, the second has {what}", ranks(sound, other), FLEETX)


def _manifests() -> Iterator[Case]:
    for name, state in {
        "progress of texts": {"train": {"step": "1", "consumed_samples": 0, "epoch": 0}},
        "progress of nothing": {"train": {}},
    }.items():
        yield Case(f"manifest: {name}", lambda d, s=state: save(d, state=s), OURS, may_pass=True)


def _tokenizers() -> Iterator[Case]:
    for name, merges in {"merges of three": b"a b c\n", "merges that are no text": b"\xff\xff"}.items():
        make = instead(alone("vocab.json", b'{"a": 0}'), "merges.txt", merges)
        yield Case(f"vocabulary: {name}", make, TOKENIZER)
    for name, vocabulary in {"a list of tokens": b"[]", "ids as texts": b'{"a": "0"}'}.items():
        make = instead(alone("merges.txt", b""), "vocab.json", vocabulary)
        yield Case(f"vocabulary: {name}", make, TOKENIZER)
    yield Case("vocabulary: no merges", alone("vocab.json", b'{"a": 0}'), TOKENIZER)


def _misplaced() -> Iterator[Case]:
    """Directories, pipes, loops of links and empty files where a file should be."""
    for make, kind, name in (
        (hf, HF, "config.json"),
        (hf, HF, "model.safetensors"),
        (hf_pickled, HF, "pytorch_model.bin"),
        (fleetx, FLEETX, "model.pdparams"),
        (megatron, MEGATRON, "iter_0000007/mp_rank_00_000/model_optim_rng.pt"),
        (hf_dirs.write_tokenizer, TOKENIZER, "tokenizer.json"),
        (ours, OURS, "epoch_0_step_1/manifest.json"),
        (ours, OURS, "epoch_0_step_1/COMPLETE"),
        (ours, OURS, f"epoch_0_step_1/{RANK}/model.safetensors"),
        (ours, OURS, "latest"),
    ):
        for what, put in {
            "a directory": Path.mkdir,
            "a pipe": os.mkfifo,
            "a loop of links": lambda path: path.symlink_to(path),
            "no byte": Path.touch,
        }.items():
            may_pass = name == "latest"  # without it, there is another way
            yield Case(f"{what} for {name}", instead(make, name, put), kind, may_pass=may_pass)


def _damaged(rng: random.Random) -> Iterator[Case]:
    """Bits flipped and ends cut off, in files that were sound."""
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
                drawn, content = random.Random(seed), (directory / name).read_bytes()
                # Descriptions are at the beginning or the end, the numbers between them.
                reach = min(len(content), 2000)
                first, last = content[:reach], content[-reach:]
                if drawn.random() < 0.3:
                    content = content[: drawn.randrange(len(content))]
                elif drawn.random() < 0.5:
                    content = flipped(first, drawn, 4) + content[reach:]
                else:
                    content = content[:-reach] + flipped(last, drawn, 4)
                (directory / name).write_bytes(content)

            yield Case(f"damage {number} in {name}", write, kind, may_pass=True)
