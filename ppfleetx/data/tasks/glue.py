"""The GLUE tasks (Wang et al., 2019): their official TSV files, labels and submission files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError, shown
from ppfleetx.data.text.files import read_lines
from ppfleetx.utils.foreign_files import os_errors
from ppfleetx.utils.log import get_logger

_ENTAILMENT = ("entailment", "not_entailment")
_BINARY = ("0", "1")


@dataclass(frozen=True)
class GlueTask:
    """One task and the layout of its files. Fields are separated by tabs; quotes mean nothing.

    Attributes:
        name: as in ``Data.*.dataset.name``.
        title: GLUE's own name, that of the submission file.
        texts: header names of the one or two texts.
        label: header name of the label.
        labels: what it may be, in the order of the classes; none: a number from 0 to 5.
        headerless: columns by name of train and dev files that begin without a header.
        has_bad_rows: rows of another number of fields are known in the official train and dev files, and left
            out.
    """

    name: str
    title: str
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = _BINARY
    headerless: Mapping[str, int] = field(default_factory=dict)
    has_bad_rows: bool = False

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def file_name(self, part: str) -> str:
        """Name of the submission file, e.g. ``SST-2.tsv``, ``MNLI-mm.tsv``; of another part than test with
        its name, ``SST-2.dev.tsv``."""
        half = {"matched": "-m", "mismatched": "-mm"}.get(part.partition("_")[2], "")
        kind = part.partition("_")[0]
        return f"{self.title}{half}.tsv" if kind == "test" else f"{self.title}{half}.{kind}.tsv"

    def answer(self, output: Sequence[float]) -> str:
        """The model's outputs for one example as a submission wants them."""
        if self.is_regression:
            return f"{min(5.0, max(0.0, output[0])):.3f}"
        return self.labels[max(range(len(self.labels)), key=output.__getitem__)]


TASKS = {
    task.name: task
    for task in (
        GlueTask("CoLA", "CoLA", ("sentence",), headerless={"source": 0, "label": 1, "sentence": 3}),
        GlueTask("SST2", "SST-2", ("sentence",)),
        GlueTask("MRPC", "MRPC", ("#1 String", "#2 String"), label="Quality"),
        GlueTask("QQP", "QQP", ("question1", "question2"), label="is_duplicate", has_bad_rows=True),
        GlueTask("STSB", "STS-B", ("sentence1", "sentence2"), label="score", labels=()),
        GlueTask(
            "MNLI",
            "MNLI",
            ("sentence1", "sentence2"),
            label="gold_label",
            labels=("contradiction", "entailment", "neutral"),
        ),
        GlueTask("QNLI", "QNLI", ("question", "sentence"), labels=_ENTAILMENT),
        GlueTask("RTE", "RTE", ("sentence1", "sentence2"), labels=_ENTAILMENT),
        GlueTask("WNLI", "WNLI", ("sentence1", "sentence2")),
    )
}
_COLA_FIELDS = 4
_HIGHEST_SCORE = 5.0


@dataclass(frozen=True)
class GlueExamples:
    """Examples of one file.

    Attributes:
        path: the file.
        texts: one or two texts of each example.
        labels: class number (or score) of each; None for a test file, which has none.
        digest: hash of the file.
    """

    path: Path
    texts: list[tuple[str, ...]]
    labels: list[float] | None
    digest: str


@os_errors(DataError)
def read_glue(task: GlueTask, directory: str | Path, part: str) -> GlueExamples:
    """Read ``{directory}/{part}.tsv``.

    Raises:
        DataError: the file is missing, is not UTF-8, or a line has another number of fields or an unknown
            label; with file and line.
    """
    path = Path(directory) / f"{part}.tsv"
    digest = blake2b(digest_size=16)
    rows = _rows(path, task, digest.update)
    has_header = not (task.headerless and not part.startswith("test"))
    columns, width = task.headerless, _COLA_FIELDS
    if has_header:
        columns, width = _columns(task, next(rows, (1, ""))[1], path, part)
    is_labelled = not part.startswith("test")
    texts, labels, left_out = [], [], 0
    for number, line in rows:
        fields = line.split("\t")
        if len(fields) != width:
            if not (task.has_bad_rows and is_labelled):  # answers on a test file are numbered by its lines
                raise DataError(
                    f"{path}:{number}: {counted(len(fields), 'field')} instead of {width} (separated by tabs)"
                )
            left_out += 1
            continue
        texts.append(tuple(fields[columns[name]] for name in task.texts))
        if is_labelled:
            labels.append(_label(task, fields[columns[task.label]], f"{path}:{number}"))
    if left_out:
        get_logger().warning(f"{path}: left out {counted(left_out, 'line')} without exactly {width} fields")
    if not texts:
        raise DataError(f"{path} holds no example")
    return GlueExamples(path, texts, labels if is_labelled else None, digest.hexdigest())


def _rows(path: Path, task: GlueTask, see: Callable[[bytes], object]) -> Iterator[tuple[int, str]]:
    """(line number, line) of all lines that are not empty."""
    if not path.exists():
        raise DataError(
            f"there is no file {path}; {task.title} is read from GLUE's own TSV files, one per part "
            "(Data.*.dataset.input_dir names their directory, split the part)"
        )
    for number, line in read_lines(path, see):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: this is not UTF-8 text") from error
        if text:
            yield number, text


def _columns(task: GlueTask, line: str, path: Path, part: str) -> tuple[dict[str, int], int]:
    """Column of each name in the header line, and their number."""
    header = line.split("\t")
    needed = task.texts if part.startswith("test") else (*task.texts, task.label)
    absent = [name for name in needed if name not in header]
    if absent:
        raise DataError(
            f"{path}:1: the header of {task.title} must name {', '.join(needed)}; "
            f"{', '.join(absent)} is missing"
        )
    return {name: column for column, name in enumerate(header)}, len(header)


def _label(task: GlueTask, text: str, place: str) -> float:
    if not task.is_regression:
        if text not in task.labels:
            raise DataError(
                f"{place}: unknown label {shown(text)}; {task.title} has {', '.join(task.labels)}"
            )
        return task.labels.index(text)
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0.0 <= score <= _HIGHEST_SCORE:
        raise DataError(f"{place}: the score {shown(text)} is no number from 0 to {_HIGHEST_SCORE:g}")
    return score
