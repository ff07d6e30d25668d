"""Training data from conversations written by a chat template, with the loss on the assistant's turns."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError, UserError
from ppfleetx.data.chat.templates import ASSISTANT, render_with_answers, template_of
from ppfleetx.data.gpt_dataset import PADDING, Sample
from ppfleetx.data.tasks.records import MESSAGES, RecordDataset, read_conversation, record_file
from ppfleetx.data.text_files import read_records
from ppfleetx.utils.foreign_files import os_errors
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import DatasetConfig
    from ppfleetx.data.chat.templates import Message
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer


class ChatDataset(RecordDataset):
    """Conversations, for causal language modelling with the loss on the assistant's turns.

    A record of the file has one of the forms of `ppfleetx.data.tasks.records`. The template decides about BOS
    and about the end of a turn. A conversation that is too long loses its oldest turns, but not the system
    message. If one question with its answer is still too long, its end is cut off.

    Raises:
        DataError: the file is missing, or a record is not a conversation with an answer. The message names
            file and line.
        ConfigError: there is no such template.
    """

    @os_errors(DataError)
    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, length_multiple: int = 1) -> None:
        path = record_file(cfg)
        self.template = template_of(cfg, tokenizer)
        self._lines, digest = _read(path)
        more = [self.template.source, dict(self.template.special_tokens)]
        super().__init__(cfg, tokenizer, path, digest, length_multiple, more)
        self._has_told = False

    def __len__(self) -> int:
        return len(self._lines)

    def describe(self) -> str:
        return f"{super().describe()}, written with {self.template.place}"

    def __getitem__(self, index: int) -> Sample:
        """Conversation ``index``, or for `PADDING` a sample whose loss mask is 0, with the arrays of
        ``PromptResponseDataset``. Raises DataError, with file and line, if the template refuses the
        conversation."""
        number, line = self._lines[max(index, 0)]
        place = f"{self.path}:{number}"
        record = read_conversation(line, place)
        try:
            ids, learnt = self._fitting(record[MESSAGES], record.get("tools"), place)
        except UserError as error:
            raise DataError(f"{place}: {error}") from error
        mask = np.zeros(self.max_seq_len, np.float32)
        if index != PADDING:
            mask[: len(ids) - 1] = learnt[1:]
        return self.causal_sample(ids, mask, index)

    def _fitting(self, messages: list[Message], tools: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
        kept = messages
        while True:
            text, spans = render_with_answers(self.template, kept, tools=tools)
            ids, learnt = self.tokenizer.encode_marked(text, spans)
            shorter = _without_oldest(kept)
            if len(ids) <= self.max_seq_len + 1 or shorter is None:
                break
            kept = shorter
        if len(kept) < len(messages) or len(ids) > self.max_seq_len + 1:
            self._warn_cut(place, len(messages) - len(kept), len(ids))
        return ids[: self.max_seq_len + 1], learnt[: self.max_seq_len + 1]

    def _warn_cut(self, place: str, left_out: int, length: int) -> None:
        if self._has_told:
            return
        self._has_told = True
        what = f"{counted(left_out, 'message')} at the beginning" if left_out else "its end"
        if length > self.max_seq_len + 1:
            what = f"{what}, and its end" if left_out else what
        get_logger().warning(
            f"{place}: is longer than max_seq_len = {self.max_seq_len} and loses {what} (logged once)"
        )


def _without_oldest(messages: Sequence[Message]) -> list[Message] | None:
    """Drop the first exchange after the system message; None if only one is left."""
    head = 1 if messages[0]["role"] == "system" else 0
    questions = [i for i, one in enumerate(messages) if i >= head and one["role"] == "user"]
    following = next((i for i in questions if i > head), None)
    if following is None or not any(one["role"] == ASSISTANT for one in messages[following:]):
        return None
    return [*messages[:head], *messages[following:]]


def _read(path: Path) -> tuple[list[tuple[int, bytes]], str]:
    digest = blake2b(digest_size=16)
    lines = list(read_records(path, digest.update))
    for number, line in lines:
        read_conversation(line, f"{path}:{number}")
    if not lines:
        raise DataError(f"{path} holds no record")
    return lines, digest.hexdigest()
