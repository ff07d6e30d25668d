"""Datasets for finetuning, with one sample per record of a file: GLUE examples, prompts with responses, or
conversations. Samples are padded on the right to ``max_seq_len`` with the end-of-document token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError, UserError
from ppfleetx.config.message_text import counted
from ppfleetx.data.build import load_tokenizer
from ppfleetx.data.chat.conversations import (
    MESSAGES,
    SYSTEM_ROLES,
    is_conversation,
    is_learned,
    read_conversation,
    with_arguments,
)
from ppfleetx.data.chat.templates import (
    ASSISTANT,
    TEMPLATE_OPTION,
    ChatError,
    render_with_answers,
    template_of,
)
from ppfleetx.data.gpt_dataset import PADDING, Sample
from ppfleetx.data.tasks.glue import TASKS, read_glue, require_libraries
from ppfleetx.data.text_files import load_object, read_records, text_of
from ppfleetx.data.tokenizer.json_files import GPT2_FILES
from ppfleetx.data.tokenizer.tokenizer import check_tokenizer
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import DatasetConfig, Mode
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.data.chat.templates import Message, Span
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer


_LENGTH_MULTIPLE = 8  # gives batches few distinct lengths, but little padding


def _inputs(cfg: RunConfig, mode: Mode) -> tuple[DatasetConfig, Tokenizer, int]:
    """Return the constructor arguments of the finetuning dataset of ``Data.<mode>``: its section, the
    tokenizer, and ``length_multiple``, described at `RecordDataset`. Raises ConfigError if no tokenizer is
    configured."""
    dataset_cfg, tokenizer = getattr(cfg.Data, mode).dataset, load_tokenizer(cfg)
    if tokenizer is None:
        raise ConfigError(
            f"names no files, and {dataset_cfg.name} is made of texts. Give a tokenizer's directory with "
            "-o Data.tokenizer.dir=DIR; ppfleetx tokenizer makes one, and vocab.json and merges.txt of "
            f"GPT-2 are at {GPT2_FILES} (nothing is downloaded)",
            key="Data.tokenizer",
        )
    check_tokenizer(tokenizer, cfg.Model.vocab_size, is_trained=True)
    # With both sequence parallelism and `sep`, each sequence is split into mp x sep parts.
    multiple = min(dataset_cfg.max_seq_len, math.lcm(_LENGTH_MULTIPLE, cfg.plan.mp * cfg.plan.sep))
    return dataset_cfg, tokenizer, multiple


class RecordDataset:
    """Base class of the finetuning datasets.

    Attributes:
        length_multiple: the data loader pads the samples of a step to a common length that is a multiple of
            this number.
        fingerprint: a hash of everything that determines the samples.
    """

    def __init__(
        self,
        cfg: DatasetConfig,
        tokenizer: Tokenizer,
        path: Path,
        digest: str,
        length_multiple: int,
        more: Sequence[object] = (),
    ) -> None:
        self.max_seq_len, self.tokenizer, self.path = cfg.max_seq_len, tokenizer, path
        self.length_multiple = length_multiple
        fields = [cfg.max_seq_len, cfg.prompt_field, cfg.response_field]
        decisive = [cfg.name, digest, tokenizer.fingerprint, *fields]
        if tokenizer.prefix_ids:  # conditional, to keep the fingerprints of runs without a prefix
            decisive.append(tokenizer.prefix_ids)
        decisive += more  # JSON values of the subclass that also determine the samples
        self.fingerprint = blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()

    @classmethod
    def of(cls, cfg: RunConfig, mode: Mode) -> Self:
        """Build the dataset that ``Data.<mode>`` describes."""
        return cls(*_inputs(cfg, mode))

    @property
    def samples_per_epoch(self) -> float:
        return float(len(self))

    def describe(self) -> str:
        examples, tokens = counted(len(self), "example", ","), counted(self.max_seq_len, "token", ",")
        return f"{self.path}: {examples}, cut to {tokens}"

    def padded(self, ids: Sequence[int]) -> np.ndarray:
        tokens = np.full(self.max_seq_len, self.tokenizer.eod_id, np.int64)
        tokens[: len(ids)] = ids
        return tokens

    def causal_sample(self, ids: Sequence[int], loss_mask: np.ndarray, index: int) -> Sample:
        return {
            "tokens": self.padded(ids[:-1]),
            "labels": self.padded(ids[1:]),
            "position_ids": np.arange(self.max_seq_len, dtype=np.int64),
            "loss_mask": loss_mask,
            "lengths": np.array(max(1, len(ids) - 1), np.int64),
            "sample_ids": np.array(index, np.int64),
        }


class GlueDataset(RecordDataset):
    """Examples of a GLUE task, for finetuning a model as a classifier. Two sentences are written as
    ``a <|endoftext|> b``. If an example is too long, tokens are removed at the end of the longer sentence."""

    def __init__(
        self,
        cfg: DatasetConfig,
        tokenizer: Tokenizer,
        length_multiple: int = 1,
        *,
        with_labels: bool = True,
    ) -> None:
        self.task, self.part = TASKS[cfg.name], cfg.split
        examples = read_glue(self.task, cfg.input_dir, cfg.split, with_labels=with_labels)
        super().__init__(cfg, tokenizer, examples.path, examples.digest, length_multiple)
        self.texts, self.labels = examples.texts, examples.labels

    @classmethod
    def of(cls, cfg: RunConfig, mode: Mode) -> Self:
        """Build the dataset that ``Data.<mode>`` describes. For ``Test``, no labels are read, because most
        test files have none."""
        inputs = _inputs(cfg, mode)
        require_libraries()
        return cls(*inputs, with_labels=mode != "Test")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        """Return example ``index``. The index `PADDING` gives an example whose loss mask is 0. The arrays are
        ``tokens`` int64 [s], ``lengths`` int64 [] (number of tokens without padding), ``labels`` int64 []
        (float32 for a regression; 0 if there are no labels), ``loss_mask`` float32 [], ``sample_ids`` int64
        []."""
        ids = self.encode(self.texts[max(index, 0)])
        label = 0 if self.labels is None else self.labels[max(index, 0)]
        return {
            "tokens": self.padded(ids),
            "lengths": np.array(len(ids), np.int64),
            "labels": np.array(label, np.float32 if self.task.is_regression else np.int64),
            "loss_mask": np.array(0.0 if index == PADDING else 1.0, np.float32),
            "sample_ids": np.array(index, np.int64),
        }

    def encode(self, texts: Sequence[str]) -> list[int]:
        parts = [self.tokenizer.encode_prompt(text, add_special_tokens=False) for text in texts]
        prefix = self.tokenizer.prefix_ids[: self.max_seq_len]
        room = max(0, self.max_seq_len - len(prefix) - (len(parts) - 1))
        sizes = truncate_longest_first([len(part) for part in parts], room)
        parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        joined = [*prefix, *parts[0]]
        for part in parts[1:]:
            joined = [*joined, self.tokenizer.eod_id, *part]
        return joined[: self.max_seq_len] or [self.tokenizer.eod_id]


def truncate_longest_first(sizes: Sequence[int], room: int) -> list[int]:
    """Return how many tokens to keep of one or two sentences, so that they have at most ``room`` tokens in
    total. ``sizes`` are their lengths in tokens. Tokens are removed from the longer sentence first."""
    if sum(sizes) <= room:
        return list(sizes)
    if len(sizes) == 1:
        return [room]
    first, second = sizes
    half = max(0, room) // 2
    if second <= half:
        return [room - second, second]
    if first <= room - half:
        return [first, room - first]
    return [room - half, half]


class PromptResponseDataset(RecordDataset):
    """Prompts with responses, for finetuning a language model with a loss on the responses only.

    A sample is ``prompt response <|endoftext|>``, after the tokenizer's own prefix (BOS or nothing). The loss
    includes ``<|endoftext|>``. If the sample is too long, the beginning of the prompt is removed and, if that
    is not enough, the end of the response. Raises DataError, with file and line, if the file is missing, or
    if a record has no string for the prompt or the response.
    """

    @os_errors(DataError)
    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, length_multiple: int = 1) -> None:
        path = record_file(cfg)
        fields = (cfg.prompt_field, cfg.response_field)
        lines, digest = _read(path)
        self.pairs = [_pair(line, f"{path}:{number}", *fields) for number, line in lines]
        super().__init__(cfg, tokenizer, path, digest, length_multiple)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of record ``index``. The index `PADDING` gives a sample whose loss mask is 0.

        The arrays are ``tokens``, ``labels``, ``position_ids`` int64 [s], ``loss_mask`` float32 [s],
        ``lengths`` int64 [] (number of positions before the padding), ``sample_ids`` int64 [].
        """
        prompt, response = self.encode(*self.pairs[max(index, 0)])
        ids, size = [*prompt, *response], len(prompt) + len(response) - 1
        mask = np.zeros(self.max_seq_len, np.float32)
        if index != PADDING:
            mask[len(prompt) - 1 : size] = 1.0
        return self.causal_sample(ids, mask, index)

    def encode(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        given = self.tokenizer.encode_prompt(prompt, add_special_tokens=False)
        learned = [*self.tokenizer.encode_continuation(response), self.tokenizer.eod_id]
        # At least one token stays before the response: if necessary, the end of the response is cut off.
        learned = learned[: self.max_seq_len]
        room = self.max_seq_len + 1 - len(learned)
        prefix = self.tokenizer.prefix_ids[:room]
        first = max(0, len(given) - (room - len(prefix)))
        return [*prefix, *given[first:]] or [self.tokenizer.eod_id], learned


def record_file(cfg: DatasetConfig) -> Path:
    endings = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")
    paths = [Path(str(cfg.input_dir)) / f"{cfg.split}{ending}" for ending in endings]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        raise DataError(
            f"there is no file {paths[0]}; {cfg.name} reads {{split}}.jsonl (or .jsonl.gz, .jsonl.zst, "
            f".json) in the directory Data.*.dataset.input_dir{_meant(cfg, endings)}"
        )
    return found


def _meant(cfg: DatasetConfig, endings: Sequence[str]) -> str:
    """If a user has named the file itself, in either key, return the two values to give, for a message."""
    directory = Path(str(cfg.input_dir))
    path = directory if directory.is_file() else directory / str(cfg.split)
    ending = next((ending for ending in endings if path.name.endswith(ending)), None)
    if ending is None or not path.is_file():
        return ""
    return (
        f". For {path}: -o Data.*.dataset.input_dir={path.parent} "
        f"-o Data.*.dataset.split={path.name.removesuffix(ending)}"
    )


def _read(path: Path) -> tuple[list[tuple[int, bytes]], str]:
    """Read the records of a file. Returns them, unparsed, as pairs (line number, bytes), and a hash of the
    file. Raises DataError if there is no record."""
    digest = blake2b(digest_size=16)
    lines = list(read_records(path, digest.update))
    if not lines:
        raise DataError(f"{path} holds no record")
    return lines, digest.hexdigest()


def _pair(line: bytes, place: str, *fields: str) -> tuple[str, ...]:
    record = load_object(line, place, " and ".join(fields))
    hint = "; prompt_field and response_field of the section name other fields"
    if is_conversation(record):
        hint = ". ChatDataset reads such conversations"
    return tuple(text_of(record, field, place, hint) for field in fields)


class ChatDataset(RecordDataset):
    """Conversations, for finetuning a language model with a loss on the assistant's turns only.

    If a conversation is too long, its oldest questions and answers are left out, but not the system message.
    If it is still too long, its end is cut off. Raises DataError, with file and line, if the file is missing
    or a record is not a conversation with an answer; ConfigError if the chat template does not exist.
    """

    @os_errors(DataError)
    def __init__(self, cfg: DatasetConfig, tokenizer: Tokenizer, length_multiple: int = 1) -> None:
        path = record_file(cfg)
        self.template = template_of(cfg, tokenizer)
        self._lines, digest = _read(path)
        for number, line in self._lines:
            self._check_tools(read_conversation(line, f"{path}:{number}"), f"{path}:{number}")
        more = [self.template.source, dict(self.template.special_tokens)]
        if self.template.with_tools is not None:
            more.append(self.template.with_tools.source)
        super().__init__(cfg, tokenizer, path, digest, length_multiple, more)
        self._warned: set[bool] = set()
        self._end_is_checked = False

    def __len__(self) -> int:
        return len(self._lines)

    def describe(self) -> str:
        return f"{super().describe()}, written with {self.template.place}"

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of conversation ``index``. The index `PADDING` gives a sample whose loss mask is
        0. Raises DataError if the chat template refuses the conversation.

        The arrays are ``tokens``, ``labels``, ``position_ids`` int64 [s], ``loss_mask`` float32 [s],
        ``lengths`` int64 [] (number of positions before the padding), ``sample_ids`` int64 [].
        """
        number, line = self._lines[max(index, 0)]
        place = f"{self.path}:{number}"
        record = read_conversation(line, place)
        if not self._end_is_checked:  # not before there is a run
            self._end_is_checked = True
            self._warn_without_end()
        try:
            ids, learned = self._fitting(record[MESSAGES], record["tools"], place)
        except UserError as error:
            raise DataError(f"{place}: {error}") from error
        mask = np.zeros(self.max_seq_len, np.float32)
        if index != PADDING:
            mask[: len(ids) - 1] = learned[1:]
        return self.causal_sample(ids, mask, index)

    def _check_tools(self, record: dict[str, Any], place: str) -> None:
        """Raise DataError if the chat template would leave out the record's tools or tool calls."""
        source = self.template.for_tools(record["tools"]).source
        has_calls = any(message.get("tool_calls") for message in record[MESSAGES])
        for name, is_used in (("tools", record["tools"] is not None), ("tool_calls", has_calls)):
            if is_used and name not in source:
                raise DataError(
                    f"{place}: has {name}, which {self.template.place} does not write; another template: "
                    f"-o Data.*.dataset.options.{TEMPLATE_OPTION}=NAME_OR_FILE"
                )

    def _rendered(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the spans of the answers to learn."""
        try:
            text, spans = render_with_answers(self.template, messages, tools=tools)
        except ChatError:
            written = [with_arguments(one, as_text=True) for one in messages]
            if written == messages:
                raise
            text, spans = render_with_answers(self.template, written, tools=tools)  # as DeepSeek's expects
        answers = [is_learned(one) for one in messages if one["role"] == ASSISTANT]
        if all(answers):
            return text, spans
        if len(spans) != len(answers):
            raise ChatError(
                f"{self.template.place} marks {counted(len(spans), 'text')} of {len(answers)} answers, so an "
                "answer of weight 0 cannot be told from the others"
            )
        return text, [span for span, is_kept in zip(spans, answers, strict=True) if is_kept]

    def _warn_without_end(self) -> None:
        """Log a warning if no token that ends a text is learned from the first conversation: answers of the
        trained model will not end, as with the template of a chat model and the tokenizer of its base."""
        number, line = self._lines[0]
        record = read_conversation(line, f"{self.path}:{number}")
        try:
            text, spans = self._rendered(record[MESSAGES], record["tools"])
            ids, learned = self.tokenizer.encode_marked(text, spans)
            ends = self.tokenizer.end_ids
        except UserError:  # a template that refuses the conversation is reported when it is read
            return
        said = [int(one) for one in ids[learned > 0] if self.tokenizer.decode([one]).strip()]
        if not said or not {*said}.isdisjoint(ends):
            return
        last = self.tokenizer.decode(said[-1:])
        advice = (
            f"-o 'Data.tokenizer.eos_token={last}' makes it one"
            if said[-1] in self.tokenizer.special_ids
            else f"the tokenizer's are {', '.join(self.tokenizer.decode([one]) for one in ends)}"
        )
        end = text[: spans[-1][1]].rstrip()[-20:]
        get_logger().warning(
            f"{self.template.place} ends answers with {end!r}, which is not a token that ends a text, so "
            f"generation will not stop there: {advice}"
        )

    def _fitting(self, messages: list[Message], tools: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
        kept = messages
        while True:
            text, spans = self._rendered(kept, tools)
            ids, learned = self.tokenizer.encode_marked(text, spans)
            shorter = _without_oldest(kept)
            if len(ids) <= self.max_seq_len + 1 or shorter is None:
                break
            kept = shorter
        length, ids, learned = len(ids), ids[: self.max_seq_len + 1], learned[: self.max_seq_len + 1]
        if len(kept) < len(messages) or length > len(ids):
            self._warn_cut(place, len(messages) - len(kept), length, is_empty=not learned[1:].any())
        return ids, learned

    def _warn_cut(self, place: str, left_out: int, length: int, *, is_empty: bool) -> None:
        if is_empty in self._warned:  # a warning of each kind
            return
        self._warned.add(is_empty)
        what = [f"{counted(left_out, 'message')} at the beginning"] if left_out else []
        if length > self.max_seq_len + 1:
            what.append("its end")
        rest = "; no answer of it is learned" if is_empty else ""
        get_logger().warning(
            f"{place}: is longer than max_seq_len = {self.max_seq_len} and loses {' and '.join(what)}{rest} "
            "(logged once)"
        )


def _without_oldest(messages: Sequence[Message]) -> list[Message] | None:
    """Return a conversation without its first question and the answers to this question. A system message is
    kept. Returns None if the rest would contain no answer to learn."""
    head = 1 if messages[0]["role"] in SYSTEM_ROLES else 0
    questions = [i for i, one in enumerate(messages) if i >= head and one["role"] == "user"]
    following = next((i for i in questions if i > head), None)
    if following is None or not any(map(is_learned, messages[following:])):
        return None
    return [*messages[:head], *messages[following:]]
