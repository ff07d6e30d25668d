"""A scratch directory that looks like a checkout, and the files that pages take for granted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.docs.blocks import ROOT, TINY

_LINKED = (
    "tools", "tasks", "projects", "examples", "ppfleetx", "benchmarks", "docs", "Makefile",
    "requirements.txt", "pyproject.toml",
)  # fmt: skip


_SECONDS = 600


class SceneError(RuntimeError):
    """What a page is given could not be made."""


def make(directory: Path) -> None:
    """Lay out an empty scene."""
    directory.mkdir(parents=True)
    for name in _LINKED:
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    command = directory / ".bin" / "ppfleetx"  # what `pip install` would put there
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ppfleetx "$@"\n', "utf-8")
    command.chmod(0o755)


def environment(directory: Path) -> dict[str, str]:
    """The environment of commands: this Python first, nothing of the user's own settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PADDLE_", "PPFLEETX_", "FLAGS_"))
    }
    path = os.pathsep.join(
        [str(directory / ".bin"), str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]
    )
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(directory), "VIRTUAL_ENV": sys.prefix}


COMMANDS = {
    "tokenizer": (
        "corpus",
        "tools/train_tokenizer.py --input corpus.jsonl --vocab-size 400 --output tokenizer",
    ),
    "data": (
        "tokenizer",
        "tools/preprocess_data.py --input corpus.jsonl --tokenizer tokenizer "
        "--output-prefix data/corpus --append-eod",
    ),
    "pretrained": (
        "gpt2",
        "tools/convert_checkpoint.py --from hf --to ppfleetx --input gpt2 --output pretrained",
    ),
}
"""Directory -> what it is made of, and how."""


def provide(name: str, directory: Path) -> None:
    """Make one of the things that a page is given. Raises KeyError for a name that is not known."""
    if name not in COMMANDS:
        MAKERS[name](directory)
    elif not (directory / name).exists():
        source, command = COMMANDS[name]
        provide(source, directory)
        _run(directory, *command.split())


def _texts() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib")) / "json"
    return [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))] * 4


def _corpus(directory: Path) -> None:
    with (directory / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in _texts())


def _my_text(directory: Path) -> None:
    (directory / "my_text").mkdir()
    for number, text in enumerate(_texts()):
        (directory / "my_text" / f"{number}.txt").write_text(text, "utf-8")


def _output(directory: Path) -> None:
    """A finished run in `output`."""
    provide("data", directory)
    _train(directory, "output", "data/corpus_text_document", "tokenizer")


def _quickstart(directory: Path) -> None:
    provide("data", directory)
    (directory / "quickstart").mkdir()
    for name in ("data", "tokenizer"):
        shutil.move(directory / name, directory / "quickstart" / name)
    for file in (directory / "quickstart" / "data").iterdir():
        file.rename(file.with_name(file.name.replace("corpus", "stdlib", 1)))
    _train(directory, "quickstart/run", "quickstart/data/stdlib_text_document", "quickstart/tokenizer")


def _gpt2(directory: Path) -> None:
    """A small model in Hugging Face's files, with its tokenizer."""
    with tempfile.TemporaryDirectory() as elsewhere:
        work = Path(elsewhere) / "work"
        make(work)
        _output(work)
        words = ("--from", "ppfleetx", "--to", "hf", "--input", "output", "--output", "gpt2")
        _run(work, "tools/convert_checkpoint.py", *words)
        for file in (work / "tokenizer").iterdir():
            shutil.copy(file, work / "gpt2")
        shutil.move(work / "gpt2", directory / "gpt2")


def _sst2(directory: Path) -> None:
    folder = directory / "dataset" / "SST-2"
    folder.mkdir(parents=True)
    rows = [
        "sentence\tlabel",
        *(f"{text} film\t{label}" for text, label in [("a good", 1), ("a bad", 0)] * 16),
    ]
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    test = ["index\tsentence", *(f"{i}\ta film" for i in range(4))]
    (folder / "test.tsv").write_text("\n".join(test) + "\n", "utf-8")


def _responses(directory: Path) -> None:
    folder = directory / "dataset" / "sft"
    folder.mkdir(parents=True)
    for split in ("train", "dev"):
        pairs = [{"prompt": f"What is {i} + 1? ", "response": f"{i + 1}"} for i in range(32)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), "utf-8")


def _book(directory: Path) -> None:
    (directory / "book.txt").write_text("\n".join(_texts()[:2]), "utf-8")
    words = [{"text": "the cat sat on the mat"}, {"text": "import json and import os"}]
    (directory / "lambada_test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in words), "utf-8")


def _fleetx(directory: Path) -> None:
    """A corpus in FleetX's own files."""
    import numpy as np

    (directory / "old").mkdir()
    np.save(directory / "old" / "corpus_ids.npy", np.arange(300, dtype=np.uint16) % 50)
    np.savez(directory / "old" / "corpus_idx.npz", lens=np.array([200, 100]), docs=np.array([0, 1, 2]))


_AS_FLEETX = """
from pathlib import Path
import ppfleetx
from tests.conversion.test_fleetx import save, theirs

model = ppfleetx.load("small", overrides={"Global.device": "cpu"})
save(Path("GPT_345M"), {theirs(name): p.numpy() for name, p in model.named_parameters()})
"""


def _fleetx_weights(directory: Path) -> None:
    """A small model in FleetX's format in `GPT_345M`, and the run it comes from in `small`."""
    provide("data", directory)
    _train(directory, "small", "data/corpus_text_document", "tokenizer")
    _run(directory, "-c", _AS_FLEETX)


def _train(directory: Path, output: str, data: str, tokenizer: str) -> None:
    overrides = [
        *TINY,
        f"Engine.save_load.output_dir={output}",
        f"Data.tokenizer.dir={tokenizer}",
        "Model.vocab_size=400",
    ]
    overrides += [
        f"Data.{mode}.dataset.{key}"
        for mode in ("Train", "Eval")
        for key in (f"input_dir={data}", "max_seq_len=64")
    ]
    overrides += [f"Data.{mode}.dataset.split=[9,1,0]" for mode in ("Train", "Eval")]
    words = [word for value in overrides for word in ("-o", value)]
    _run(
        directory,
        "tools/train.py",
        "-c",
        "ppfleetx/configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml",
        *words,
    )


def _run(directory: Path, *command: str) -> None:
    done = subprocess.run(
        ["timeout", str(_SECONDS), sys.executable, *command],
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise SceneError(f"{' '.join(command)} ended with {done.returncode}\n{said}")


MAKERS: dict[str, Callable[[Path], None]] = {
    "corpus": _corpus,
    "my_text": _my_text,
    "output": _output,
    "quickstart": _quickstart,
    "gpt2": _gpt2,
    "SST-2": _sst2,
    "responses": _responses,
    "book": _book,
    "fleetx": _fleetx,
    "fleetx_weights": _fleetx_weights,
}
