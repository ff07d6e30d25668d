"""Damaged files of other programs and random configurations are accepted, or rejected as a user's error."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError, UserError
from ppfleetx.config.field_annotations import all_keys
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.conversion import hf_dirs
from tests.faults.harness import flipped

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "ppfleetx/configs"


def hugging_face(directory: Path) -> None:
    hf_dirs.write_tokenizer(hf_dirs.write(directory, "hf_gpt2"))


def megatron(directory: Path) -> None:
    shutil.copytree(ROOT / "tests/goldens/megatron/gpt2_tp2_pp2", directory)


def read(kind: str) -> Callable[[Path, Path], object]:
    if kind == "tokenizer":
        return lambda source, _: Tokenizer.load(source).encode("some text")
    return lambda source, output: convert(Conversion(kind, "ppfleetx", source, output))


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (hugging_face, "hf", "config.json"),
        (hugging_face, "hf", "model.safetensors"),
        (hugging_face, "tokenizer", "tokenizer.json"),
        (megatron, "megatron", "iter_0000007/mp_rank_01_000/model_optim_rng.pt"),
        (megatron, "megatron", "latest_checkpointed_iteration.txt"),
    ],
)
def test_a_damaged_file_is_a_users_error(tmp_path: Path, make, kind: str, name: str) -> None:
    """Any other exception fails the test. Bits are flipped near both ends, where headers are."""
    make(tmp_path / "source")
    read(kind)(tmp_path / "source", tmp_path / "sound")
    path, rng = tmp_path / "source" / name, random.Random(name)
    sound = path.read_bytes()
    reach, refused = min(len(sound), 2000), 0
    contents = [b"", sound[: len(sound) // 2]]
    contents += [flipped(sound[:reach], rng, 4) + sound[reach:] for _ in range(4)]
    contents += [sound[:-reach] + flipped(sound[-reach:], rng, 4) for _ in range(4)]
    for number, content in enumerate(contents):
        path.write_bytes(content)
        try:
            read(kind)(tmp_path / "source", tmp_path / f"{number}")
        except UserError as error:
            refused += 1
            assert str(tmp_path / "source") in str(error) or path.name in str(error)
    assert refused >= 3


# Right for some key or for none.
_VALUES = """
    0 1 2 3 8 1024 0.0 0.1 1e-3 true null auto cpu float16 full linear rope RMSNorm GPTDataset beam_search
    [6,6,6,6] ./data ~ off -1 1.5 1e999 .nan 0x10 1000000000000 None '' [] {} [[]] [null] {a:1} {'':1} *x &x
    !!python/object:os.system [ { : - | % @ ` 2022-01-01 ${HOME} é 数据 \u200b 🙂
"""
VALUES = _VALUES.split()


def outcome(path: Path, overrides: list[str]) -> str:
    """``accepted`` or ``refused``; any exception but a ConfigError with a place fails the test."""
    try:
        check_report(load_config(path, overrides))
    except ConfigError as error:
        assert error.place
        assert len(str(error)) < 6000 and all(line.isprintable() for line in str(error).splitlines())
        return "refused"
    return "accepted"


@pytest.mark.slow
def test_odd_overrides_are_accepted_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rng, keys = random.Random(3), all_keys(RunConfig)
    files = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "_base_" not in path.parts]
    found = []
    for number in range(150):
        key, value = rng.choice(keys), rng.choice(VALUES)
        text = rng.choice([f"{key}={value}"] * 6 + [f"{key}.0={value}", f"{key[:-1]}={value}", value])
        found.append(outcome(files[number % len(files)], [text]))
    assert found.count("accepted") > 5 and found.count("refused") > 60


@pytest.mark.slow
def test_odd_lines_are_accepted_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CONFIGS, tmp_path / "configs")
    rng, files, found = random.Random(5), sorted(CONFIGS.rglob("*.yaml")), []
    for number in range(150):
        source = files[number % len(files)]
        lines = source.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at : at + 1] = rng.choice(
            [
                *[[re.sub(r"(: )\S.*", rf"\g<1>{rng.choice(VALUES)}", lines[at])]] * 5,
                [],
                [lines[at], lines[at]],
                ["  " + lines[at]],
                [lines[at].lstrip()],
                [rng.choice(["---", "...", "\t", "? ", "- 1", "\0"]), lines[at]],
                [lines[at][: len(lines[at]) // 2]],
            ]
        )
        path = (tmp_path / "configs" / source.relative_to(CONFIGS)).with_name("mutated.yaml")
        path.write_text("\n".join(lines))
        found.append(outcome(path, []))
    assert found.count("accepted") > 15 and found.count("refused") > 30
