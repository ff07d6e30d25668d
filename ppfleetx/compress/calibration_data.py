"""Read windows of token ids on which a compressed model is calibrated and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.tokenized_corpus import open_tokens
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

_TEXT = (".txt", ".md", ".text")
_EVALUATION_DIVISOR = 10  # the last tenth of the tokens is reserved for evaluation


@dataclass(frozen=True)
class Samples:
    """Token ids for calibration and evaluation, int64 ``[windows, s + 1]``. Each window has s input tokens
    and one more token, because the labels are the inputs shifted by one position.

    Attributes:
        calibration: the windows for calibration.
        evaluation: the windows on which perplexity is measured.
    """

    calibration: np.ndarray
    evaluation: np.ndarray


def read_samples(
    place: str,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    seq_len: int,
    num_windows: int,
    min_tokens: int,
) -> Samples:
    """Read windows of tokens for calibration and evaluation from a corpus or a text file. Evaluation
    windows come from the last tenth of the tokens, calibration windows from the rest.

    Args:
        place: the path prefix of a token corpus, or a ``.txt``, ``.text`` or ``.md`` file.
        tokenizer: needed for a text file.
        seq_len: input tokens per window.
        num_windows: maximum number of calibration windows. Evaluation uses at most half as many, but at least
            one.
        min_tokens: minimum number of calibration tokens.

    Raises:
        DataError: the data cannot be read, or a token id is outside the model's vocabulary.
        ConfigError: there is too little data.
    """
    tokens = _tokens(place, tokenizer)
    border = len(tokens) - len(tokens) // _EVALUATION_DIVISOR
    calibration = _windows(tokens[:border], seq_len, num_windows)
    evaluation = _windows(tokens[border:], seq_len, max(1, num_windows // 2))
    found = calibration[:, 1:].size
    if found < min_tokens or not len(evaluation):
        raise ConfigError(
            f"holds {counted(len(tokens), 'token')}: {counted(len(calibration), 'window')} of {seq_len} to "
            f"calibrate on, {len(evaluation)} to measure with. At least {min_tokens} tokens (as many as the "
            "widest matrix has inputs) and one window are needed. Give more text, or more windows with "
            "--samples",
            key="--calibration",
            value=place,
        )
    if calibration.max() >= vocab_size or evaluation.max() >= vocab_size:
        raise DataError(f"{place} holds token ids that are not below the model's vocabulary of {vocab_size}")
    return Samples(calibration, evaluation)


def _tokens(place: str, tokenizer: Tokenizer | None) -> np.ndarray:
    path = Path(place)
    if path.suffix in _TEXT and path.is_file():
        if tokenizer is None:
            raise DataError(f"{place} is a text, and no tokenizer is stored with the checkpoint")
        try:
            return tokenizer.encode_to_numpy(path.read_text("utf-8")).astype(np.int64)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{place} cannot be read: {error}") from error
    corpus = open_tokens(place)
    return corpus.flat(0, corpus.num_tokens)


def _windows(tokens: np.ndarray, seq_len: int, most: int) -> np.ndarray:
    width = seq_len + 1
    there = len(tokens) // width
    chosen = sorted({there * i // most for i in range(most)}) if there else []
    rows = [tokens[i * width : (i + 1) * width] for i in chosen]
    return np.stack(rows).astype(np.int64) if rows else np.empty((0, width), np.int64)
