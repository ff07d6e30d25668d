"""Inputs for evaluating a model on a text file: by perplexity in sliding windows, or by prediction of the
last word of each line (cloze, as in LAMBADA). For both, the file is divided into :class:`Window` objects,
which :func:`window_batches` batches for the data ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Protocol

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections.generation import DetokenizerName, OfflineEvalConfig
from ppfleetx.data.dataloader import MicroBatch
from ppfleetx.data.text_files import TextFile, load_object, text_of
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.log import get_logger

_Rule = Callable[[str], str]


def _literal(*pairs: tuple[str, str]) -> list[_Rule]:
    return [partial(re.compile(re.escape(old)).sub, new) for old, new in pairs]


def _inside(opening: str, closing: str) -> _Rule:
    """Return a function that removes the spaces just inside a pair of brackets or quotes: ``( a )`` becomes
    ``(a)``."""

    def apply(text: str) -> str:
        # A regular expression would scan to the end of the text for each unclosed bracket.
        parts, position = [], 0
        while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start + 1)) >= 0:
            parts += [text[position : start + 1], text[start + 1 : end].strip(), closing]
            position = end + 1
        return "".join([*parts, text[position:]])

    return apply


_WIKITEXT = [
    *_literal(("s '", "s'")),
    # Meant for years (' 90s) but matches almost nothing. Published perplexities include this bug.
    partial(re.compile(r"/' [0-9]/").sub, "/'[0-9]/"),
    *_literal((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *_literal(*((f" {sign} ", f"{sign} ") for sign in ":;.!?,")),
    *(_inside(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    *_literal(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *_literal((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")),
    *_literal((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
]
_PTB = _literal(
    (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")
)
_RULES: dict[str, list[_Rule]] = {
    "wikitext": _WIKITEXT,
    "ptb": _PTB,
    "lambada": [],
    "none": [],
}


def detokenizer(name: DetokenizerName) -> Callable[[str], str]:
    """Return a function that turns the tokenized text of a benchmark, such as ``a word , and``, into ordinary
    text. The functions for ``lambada`` and ``none`` change nothing.
    """
    rules = _RULES[name]

    def detokenize(text: str) -> str:
        for rule in rules:
            text = rule(text)
        return text

    return detokenize


def detokenizer_of_file(path: str) -> DetokenizerName:
    """Choose the detokenizer for an evaluation file by its name: ``wikitext`` if the name contains ``wiki``,
    ``ptb`` if it contains ``ptb``, else ``none``."""
    name = PurePath(path).name.lower()
    if "wiki" in name:
        return "wikitext"
    return "ptb" if "ptb" in name else "none"


_KEY = "Offline_Eval.eval_path"


@dataclass(frozen=True)
class Window:
    """A window of n + 1 consecutive tokens to evaluate, ``ids`` int64 [n + 1]. The first n are the model's
    input, and the last n the labels. Only the last ``num_scored`` labels count in the result."""

    ids: np.ndarray
    num_scored: int


class EvaluationSet(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Window: ...


class SlidingWindows:
    """Overlapping windows over a text, for its perplexity. Windows have at most ``max_seq_len`` labels, and a
    window begins every ``stride`` tokens. Each token except the first is scored exactly once, in the first
    window that has it as a label. ``num_words`` is the number of words in the file, and ``detokenizer`` the
    name of the detokenizer that was applied to its text."""

    def __init__(
        self, ids: np.ndarray, max_seq_len: int, stride: int, *, num_words: int, detokenizer: str
    ) -> None:
        self.ids, self.num_words, self.detokenizer = ids, num_words, detokenizer
        self._length, self._stride = max_seq_len, stride

    @property
    def num_scored(self) -> int:
        return self.ids.size - 1

    def __len__(self) -> int:
        beyond_first = max(0, self.num_scored - self._length)
        return 1 + -(-beyond_first // self._stride)

    def __getitem__(self, number: int) -> Window:
        start = number * self._stride
        end = min(start + self._length, self.num_scored)
        # The first window scores all its labels, and each later window only the labels after the previous
        # window.
        done = start - self._stride + self._length if number else 0
        return Window(self.ids[start : end + 1], end - done)


class LastWords:
    """The windows of a cloze evaluation, one per line of the file, the longest first. A window scores the
    last word of its line or, without ``cloze_strict``, the last token. Window i is from line ``order[i]`` of
    the file, where lines are numbered from 0, without blank lines."""

    def __init__(self, windows: Sequence[Window]) -> None:
        # Sorting gives the windows of a batch similar lengths, and so little padding.
        self.order = sorted(range(len(windows)), key=lambda number: -windows[number].ids.size)
        self._windows = [windows[number] for number in self.order]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> Window:
        return self._windows[number]


def window_batches(
    windows: EvaluationSet,
    batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    *,
    multiple_of: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the batches of windows that one data rank evaluates: ``tokens``, ``position_ids``, ``labels``
    (int64) and ``loss_mask`` (float32), each ``[b, s]``. b is at most ``batch_size``, and the same on all
    ranks. s is a multiple of ``multiple_of``, and can differ between ranks. Padding has a loss mask of 0."""
    for start in range(0, len(windows), batch_size * data_size):
        rows = min(batch_size, -(-(len(windows) - start) // data_size))
        first = start + data_rank * rows
        yield _batch([windows[i] for i in range(first, min(first + rows, len(windows)))], rows, multiple_of)


def num_batches(windows: EvaluationSet, batch_size: int, data_size: int = 1) -> int:
    return -(-len(windows) // (batch_size * data_size))


def _batch(windows: Sequence[Window], rows: int, multiple_of: int) -> MicroBatch:
    longest = max((window.ids.size - 1 for window in windows), default=1)
    length = -(-longest // multiple_of) * multiple_of
    tokens = np.zeros([rows, length], np.int64)
    labels, mask = np.zeros_like(tokens), np.zeros([rows, length], np.float32)
    for row, window in enumerate(windows):
        size = window.ids.size - 1
        tokens[row, :size], labels[row, :size] = window.ids[:-1], window.ids[1:]
        mask[row, size - window.num_scored : size] = 1.0
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(length), [rows, length]))
    return {"tokens": tokens, "position_ids": positions, "labels": labels, "loss_mask": mask}


def read_evaluation_set(cfg: OfflineEvalConfig, tokenizer: Tokenizer) -> SlidingWindows | LastWords:
    """Read the file ``Offline_Eval.eval_path`` and divide it into windows. Raises ConfigError if the file
    cannot be read or is empty, and DataError if its content is invalid."""
    text = read_text(cfg)
    return _read_cloze(cfg, text, tokenizer) if cfg.cloze_eval else _read_perplexity(cfg, text, tokenizer)


def read_text(cfg: OfflineEvalConfig, place: str | None = None) -> str:
    """Return the text of the file ``Offline_Eval.eval_path``, decompressed and without a byte order mark.
    Raises ConfigError if the file cannot be read or is empty. ``place`` is the configuration file and line
    where ``eval_path`` was set, for messages."""
    name = cfg.eval_path
    if name is None:
        what = "jsonl file (cloze_eval: True)" if cfg.cloze_eval else "text file"
        raise ConfigError(f"names no file; give -o {_KEY}=FILE, a {what}", key=_KEY, place=place)
    try:
        with TextFile(Path(name)) as file:
            text = file.read_all().decode("utf-8-sig")
    except DataError as error:
        raise ConfigError(str(error), key=_KEY, place=place) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "cannot be read: it is not UTF-8 text", key=_KEY, value=name, place=place
        ) from error
    if not text or text.isspace():
        raise ConfigError("is empty", key=_KEY, value=name, place=place)
    return text


def _read_perplexity(cfg: OfflineEvalConfig, text: str, tokenizer: Tokenizer) -> SlidingWindows:
    if ".jsonl" in Path(cfg.eval_path).suffixes:
        get_logger().warning(
            f"{cfg.eval_path} is evaluated as plain text, including its JSON notation. With "
            "Offline_Eval.cloze_eval=True, its records are read"
        )
    rules = cfg.detokenizer or detokenizer_of_file(cfg.eval_path)
    ids = np.array(tokenizer.encode_prompt(detokenizer(rules)(text)), np.int64)
    if ids.size < 2:
        raise DataError(f"{cfg.eval_path}: {ids.size} token leaves nothing to predict")
    return SlidingWindows(
        ids, cfg.max_seq_len, cfg.overlapping_eval, num_words=count_words(text), detokenizer=rules
    )


def count_words(text: str) -> int:
    """Count the words of ``text`` for its word-level perplexity. ``text`` is split at every single space, and
    nowhere else."""
    return len(text.strip().split(" "))


def _read_cloze(cfg: OfflineEvalConfig, text: str, tokenizer: Tokenizer) -> LastWords:
    # Not splitlines(): a text may contain form feeds and other separators that do not end a line.
    windows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{cfg.eval_path}:{number}"
            text_of_line = text_of(load_object(line.encode(), place, '"text"'), "text", place)
            windows.append(_cloze_window(text_of_line, cfg, tokenizer, place))
    return LastWords(windows)


def _cloze_window(text: str, cfg: OfflineEvalConfig, tokenizer: Tokenizer, place: str) -> Window:
    """Return the window for ``text``, one text of a cloze file. The window scores the last word or, without
    ``cloze_strict``, the last token. If ``text`` is too long, its beginning is cut off. Raises DataError if
    ``text`` has fewer than two words, or if the last word is longer than a window."""
    words = text.split()
    if len(words) < 2:
        raise DataError(f"{place}: needs a context and a last word")
    if cfg.cloze_strict:
        before = tokenizer.encode_prompt(text[: text.rindex(words[-1])].strip(), add_special_tokens=False)
        target = tokenizer.encode_continuation(" " + words[-1])
    else:
        ids = tokenizer.encode_prompt(text, add_special_tokens=False)
        before, target = ids[:-1], ids[-1:]
    context = [*tokenizer.prefix_ids, *before]
    if len(target) > cfg.max_seq_len:
        raise DataError(
            f"{place}: the last word has {len(target)} tokens, a window {cfg.max_seq_len} "
            "(Offline_Eval.max_seq_len)"
        )
    ids = np.array([*context, *target], np.int64)
    return Window(ids[-(cfg.max_seq_len + 1) :], len(target))
