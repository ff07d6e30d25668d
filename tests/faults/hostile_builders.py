"""Directories of foreign formats, sound ones and damaged ones, as `hostile_files` puts its cases together."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.slices import whole
from tests.checkpoint.checkpoints import save
from tests.conversion import hf_dirs
from tests.helpers.hf_weights import hf_to_canonical

GOLDENS = Path(__file__).parents[1] / "goldens"
Make = Callable[[Path], Any]


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
    renamed = {}
    for name, array in hf_to_canonical(config, arrays.__getitem__):
        for ours, theirs in (
            ("attention.", "self_attn."),
            (".qkv.", ".qkv_proj."),
            ("input_norm", "norm1"),
            ("mlp_norm", "norm2"),
            ("mlp.fc", "linear"),
            ("final_norm", "norm"),
            ("embedding.", "embeddings."),
        ):
            name = name.replace(ours, theirs)
        renamed[f"gpt.{name}"] = array
    return renamed


def megatron(directory: Path) -> None:
    """The same network as PyTorch saved it for Megatron-LM."""
    shutil.copytree(GOLDENS / "megatron" / "gpt2_tp2_pp2", directory, dirs_exist_ok=True)


def ours(directory: Path) -> None:
    """A checkpoint of ours with a whole network."""
    config, arrays = hf_dirs.golden("hf_gpt2")
    save(
        directory, tensors=[whole(name, array) for name, array in hf_to_canonical(config, arrays.__getitem__)]
    )


# ---- PyTorch's archives, without PyTorch


def write_torch(path: Path, tensors: Mapping[str, np.ndarray], **options: Any) -> None:
    """A state dict as ``torch.save`` lays it out; ``options`` as of :func:`archive`."""
    described, members = b"\x80\x02}(", []
    for number, (name, array) in enumerate(tensors.items()):
        described += text(name) + tensor(array.shape, str(number).encode())
        members.append((f"archive/data/{number}", np.ascontiguousarray(array, "<f4").tobytes()))
    archive(path, described + b"u.", members, **options)


def tensor(
    shape: tuple[int, ...],
    key: bytes = b"0",
    *,
    count: int | None = None,
    stride: Any = None,
    offset: int = 0,
) -> bytes:
    """Instructions that make a float32 tensor of a storage."""
    steps = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))] if stride is None else stride
    count = int(np.prod(shape)) if count is None else count
    place = b"(S'storage'\nctorch\nFloatStorage\nS'%s'\nS'cpu'\nI%d\ntQI%d\n" % (key, count, offset)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + numbers(shape) + numbers(steps) + b"I00\nNtR"


def archive(
    path: Path, described: bytes, members: Any = (), *, compression: int = zipfile.ZIP_STORED
) -> None:
    """A zip archive with ``data.pkl`` and further members."""
    with warnings.catch_warnings():  # a name twice is what some of these are about
        warnings.simplefilter("ignore", UserWarning)
        with zipfile.ZipFile(path, "w", compression) as made:
            made.writestr("archive/data.pkl", described)
            for name, content in members:
                made.writestr(name, content)


def repeated(path: Path, name: str, block: bytes, times: int, described: bytes | None = None) -> None:
    """An archive with a deflated member of a block, many times over."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        if described is not None:
            made.writestr("archive/data.pkl", described)
        with made.open(f"archive/{name}", "w", force_zip64=True) as member:
            for _ in range(times):
                member.write(block)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def numbers(values: Any) -> bytes:
    return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"


# ---- what is no file


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may have a hundred bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "an endless device": _endless,
    "a loop of links": lambda path: path.symlink_to(path),
    "no byte": Path.touch,
    "a terabyte of holes": _sparse,
    "a file without permissions": _unreadable,
}


# ---- one file in a directory


def damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8)):
        # The descriptions are at the beginning or the end, the numbers between them.
        reach = min(len(content), 2000)
        at = rng.choice([rng.randrange(reach), len(content) - 1 - rng.randrange(reach)])
        content[at] = rng.choice([content[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
    path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)


def alone(name: str, content: bytes) -> Make:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)

    return write


def instead(make: Make, name: str, content: bytes) -> Make:
    def write(directory: Path) -> None:
        make(directory)
        (directory / name).write_bytes(content)

    return write


def put_in_place(make: Make, name: str, put: Callable[[Path], Any]) -> Make:
    def write(directory: Path) -> None:
        make(directory)
        (directory / name).unlink()
        put(directory / name)

    return write


def in_bin(directory: Path, content: bytes) -> None:
    hf(directory)
    (directory / "model.safetensors").unlink()
    archive(directory / "pytorch_model.bin", content, compression=zipfile.ZIP_DEFLATED)


def in_rank(directory: Path, content: bytes) -> None:
    place = directory / "release" / "mp_rank_00"
    place.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("release")
    archive(place / "model_optim_rng.pt", content, compression=zipfile.ZIP_DEFLATED)
