"""The GLUE tasks (Wang et al., 2019): official TSV files, labels, metrics and submission files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError, shown
from ppfleetx.config.message_text import counted
from ppfleetx.data.text_files import read_lines
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.log import get_logger

_ENTAILMENT = ("entailment", "not_entailment")
_BINARY = ("0", "1")


@dataclass(frozen=True)
class GlueTask:
    """A GLUE task and the layout of its TSV files.

    Attributes:
        title: the task's name in GLUE, such as ``SST-2``.
        texts, label: the names of the columns with the one or two sentences, and with the label.
        labels: the possible labels, in the order of the classes; empty for a regression.
        columns_without_header: the number of each named column in files without a header line; empty if a
            header line is required.
        has_bad_rows: whether files of the task have rows with a wrong number of fields. Such rows are skipped
            when labels are read.
        original_files: the file to read if there is no ``{part}.tsv``, by part (train, dev, test). These are
            files of the data set that GLUE took the task from.
    """

    name: str
    title: str
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = _BINARY
    columns_without_header: Mapping[str, int] = field(default_factory=dict)
    has_bad_rows: bool = False
    original_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def file_name(self, part: str) -> str:
        """Return the name of the submission file for one part of the task, such as ``MNLI-mm.tsv``, or
        ``SST-2.dev.tsv`` for a part that is not a test set."""
        half = {"matched": "-m", "mismatched": "-mm"}.get(part.partition("_")[2], "")
        kind = part.partition("_")[0]
        return f"{self.title}{half}.tsv" if kind == "test" else f"{self.title}{half}.{kind}.tsv"

    def answer(self, output: Sequence[float]) -> str:
        """Return the prediction for one example as it is written in a submission file. ``output`` are the
        model's class scores, or the predicted number.
        """
        if self.is_regression:
            return f"{min(5.0, max(0.0, output[0])):.3f}"
        return self.labels[max(range(len(self.labels)), key=output.__getitem__)]


TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "CoLA",
            "CoLA",
            ("sentence",),
            columns_without_header={"source": 0, "label": 1, "sentence": 3},
            original_files={
                "train": "raw/in_domain_train.tsv",
                "dev": "raw/in_domain_dev.tsv",
                "test": "raw/out_of_domain_dev.tsv",
            },
        ),
        GlueTask("SST2", "SST-2", ("sentence",)),
        GlueTask(
            "MRPC",
            "MRPC",
            ("#1 String", "#2 String"),
            label="Quality",
            original_files={part: f"msr_paraphrase_{part}.txt" for part in ("train", "test")},
        ),
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
    """The examples in one file of a GLUE task. ``texts`` has one or two sentences for each example.
    ``labels`` has a class number for each example, or a score if the task is a regression. It is None if
    labels were not read. ``digest`` is a hash of the file."""

    path: Path
    texts: list[tuple[str, ...]]
    labels: list[float] | None
    digest: str


@os_errors(DataError)
def read_glue(task: GlueTask, directory: str | Path, part: str, *, with_labels: bool = True) -> GlueExamples:
    """Read one part of a GLUE task from ``directory``. Most test files have no labels, and need
    ``with_labels=False``. Raises DataError, with file and line, if the file is missing or not UTF-8, or if a
    line is not a valid example. QQP's rows with a wrong number of fields are skipped if labels are read."""
    path = _file(task, Path(directory), part)
    digest = blake2b(digest_size=16)
    rows = _rows(path, digest.update)
    first = next(rows, (1, ""))
    if task.columns_without_header and not set(task.texts) <= set(first[1].split("\t")):
        columns, width = task.columns_without_header, _COLA_FIELDS
        rows = chain([first] if first[1] else [], rows)
    else:
        columns, width = _columns(task, first[1], path, with_labels=with_labels)
    texts, labels, left_out = [], [], 0
    for number, line in rows:
        fields = line.split("\t")
        if len(fields) != width:
            if not (task.has_bad_rows and with_labels):  # test predictions are numbered by line
                raise DataError(
                    f"{path}:{number}: {counted(len(fields), 'field')} instead of {width} (separated by tabs)"
                )
            left_out += 1
            continue
        texts.append(tuple(fields[columns[name]] for name in task.texts))
        if with_labels:
            labels.append(_label(task, fields[columns[task.label]], f"{path}:{number}"))
    if left_out:
        get_logger().warning(f"{path}: left out {counted(left_out, 'line')} without exactly {width} fields")
    if not texts:
        raise DataError(f"{path} holds no example")
    return GlueExamples(path, texts, labels if with_labels else None, digest.hexdigest())


def _file(task: GlueTask, directory: Path, part: str) -> Path:
    path = directory / f"{part}.tsv"
    original = directory / task.original_files.get(part, path.name)
    if path.exists() or original.exists():
        return path if path.exists() else original
    also = f" (or {original.relative_to(directory)})" if original != path else ""
    raise DataError(
        f"there is no file {path}{also}; {task.title} is read from GLUE's own TSV files, one per part "
        "(Data.*.dataset.input_dir names their directory, split the part)"
    )


def _rows(path: Path, see: Callable[[bytes], object]) -> Iterator[tuple[int, str]]:
    for number, line in read_lines(path, see):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: this is not UTF-8 text") from error
        if text:
            yield number, text


def _columns(task: GlueTask, line: str, path: Path, *, with_labels: bool) -> tuple[dict[str, int], int]:
    header = line.split("\t")
    needed = (*task.texts, task.label) if with_labels else task.texts
    absent = [name for name in needed if name not in header]
    if absent == [task.label]:
        raise DataError(
            f"{path}:1: holds no labels (the header of {task.title} has no {task.label}), so no model can be "
            "trained or evaluated on it; put it in Data.Test"
        )
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
        raise DataError(f"{place}: the score {shown(text)} is not a number from 0 to {_HIGHEST_SCORE:g}")
    return score


_ACCURACY_AND_F1 = ("MRPC", "QQP")


def require_libraries() -> None:
    """Raise DataError if scikit-learn or scipy, which GLUE's metrics need, is not installed."""
    missing = [name for name in ("sklearn", "scipy") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"GLUE's metrics need {' and '.join(missing)}, which is not installed: "
            "pip install 'ppfleetx[glue]'"
        )


def glue_metrics(task: str, outputs: np.ndarray, labels: Sequence[float]) -> dict[str, float]:
    """Compute the official metrics of a GLUE task, each between -1 and 1. A correlation that is undefined
    counts as 0. ``outputs`` are the model's class scores ``[examples, classes]``, or predicted numbers
    ``[examples, 1]`` for a regression."""
    truth = np.asarray(labels)
    if task == "STSB":
        return _correlations(outputs[:, 0], truth)
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    predicted, truth = outputs.argmax(axis=1), truth.astype(np.int64)
    if task == "CoLA":
        return {"mcc": float(matthews_corrcoef(truth, predicted))}
    accuracy = {"accuracy": float(accuracy_score(truth, predicted))}
    if task in _ACCURACY_AND_F1:
        accuracy["f1"] = float(f1_score(truth, predicted, zero_division=0.0))
    return accuracy


def _correlations(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    import warnings

    from scipy.stats import pearsonr, spearmanr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant inputs have no defined correlation
        found = {
            "pearson": float(pearsonr(predicted, truth)[0]) if len(truth) > 1 else math.nan,
            "spearman": float(spearmanr(predicted, truth)[0]) if len(truth) > 1 else math.nan,
        }
    return {name: 0.0 if math.isnan(value) else value for name, value in found.items()}
