"""Adapt our checkpoints to lm-evaluation-harness, an optional dependency."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections.root import GenerationConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.huggingface.generation_config import DEFAULTS
from ppfleetx.data.tasks.evaluation import LastWords, Window, window_batches
from ppfleetx.generation.generator import Generator
from ppfleetx.nn.loss import token_scores
from ppfleetx.parallel.step_runner import to_tensors
from ppfleetx.utils.progress_bar import ProgressBar

_DEFAULT_NEW_TOKENS = 256
# The harness's name of an option -> our name in the section Generation.
_SAME_MEANING = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "num_beams": "num_beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "min_new_tokens": "min_dec_len",
}


class HarnessModel(TemplateLM):
    """Adapter that lets lm-evaluation-harness score text and generate with a checkpoint. If context and
    continuation do not fit into the model's context length, the beginning of the context is cut off. If a
    continuation to score does not fit alone, DataError is raised.

    Args:
        generator: the loaded model and its tokenizer.
        vocab_size: ``Model.vocab_size``, without padding. Probabilities are over these tokens.
        batch_size: the number of sequences per forward pass.
    """

    def __init__(self, generator: Generator, vocab_size: int, *, batch_size: int = 8) -> None:
        super().__init__()
        self._generator, self._vocab_size, self._batch_size = generator, vocab_size, batch_size
        self._model, self._tokenizer = generator.next_token_model.model, generator.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context: BOS if the tokenizer has one, else the end-of-text
        token."""
        return self._tokenizer.start_id

    @property
    def max_length(self) -> int:
        """The model's context length in tokens (``Model.max_position_embeddings``)."""
        return self._generator.max_positions

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a prompt. Tokens that the tokenizer puts before a text, such as BOS, are prepended unless
        ``add_special_tokens`` is False. No end-of-text token is appended, even if the tokenizer normally
        appends one."""
        # `prefix_ids` has BOS if transformers prepends it. The harness's own models prepend it with
        # add_bos_token=True.
        ids = self._tokenizer.encode_prompt(string, add_special_tokens=False)
        return ids if add_special_tokens is False else [*self._tokenizer.prefix_ids, *ids]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return, for each request, the log probability of the continuation given the context, and whether
        greedy decoding would produce the continuation. Overrides the harness's method, which can put two BOS
        tokens before a context."""
        parts = []
        for context, continuation in (request.args for request in requests):
            if context:
                before, after = self._encode_pair(context, continuation)
            else:
                after = self.tok_encode(continuation, add_special_tokens=False)
                before = [self.prefix_token_id]
            parts.append(((context, continuation), before, after))
        return self._loglikelihood_tokens(parts, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return, for each request, the log probability of the continuation given the context, and whether
        greedy decoding would produce the continuation. A request is a tuple (unused, context ids,
        continuation ids). An empty continuation gives (0, True). If a request has more than `max_length` + 1
        tokens (the last one is not an input of the model), the beginning of the context is left out. Raises
        DataError if a continuation alone has more than `max_length` tokens."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        windows, numbers = [], []
        for number, (_, context, continuation) in enumerate(requests):
            if continuation:
                windows.append(self._window(context, continuation))
                numbers.append(number)
        texts = LastWords(windows)
        for position, result in zip(texts.order, self._score(texts, show=not disable_tqdm), strict=True):
            results[numbers[position]] = result
        return results

    def _window(self, context: list[int], continuation: list[int]) -> Window:
        if len(continuation) > self.max_length:
            raise DataError(
                f"a text to be scored at once has {len(continuation)} tokens, the model {self.max_length} "
                "positions (Model.max_position_embeddings)"
            )
        ids = np.asarray([*context, *continuation], np.int64)
        return Window(ids[-self.max_length - 1 :], len(continuation))

    def _score(self, windows: LastWords, *, show: bool) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        self._model.eval()
        with (
            paddle.no_grad(),
            ProgressBar("scoring", total=len(windows), unit="text", show="auto" if show else False) as bar,
        ):
            for arrays in window_batches(windows, self._batch_size):
                batch = to_tensors(arrays)
                logits = self._model(batch["tokens"], batch["position_ids"])
                log_probs, greedy = token_scores(
                    logits, batch["labels"], batch["loss_mask"], self._vocab_size
                )
                sums, right = log_probs.sum(axis=1).tolist(), greedy.all(axis=1).tolist()
                results += zip(sums, right, strict=True)
                bar.advance(len(sums))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each request's string. A string that is longer than the model's
        context length is scored in windows, each token once."""
        parts, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                parts.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(parts, disable_tqdm=disable_tqdm)
        for owner, (log_prob, _) in zip(owners, found, strict=True):
            totals[owner] += log_prob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each request's context. Returns the continuations, each cut off before
        the first stop string of its request."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        total, show = len(requests), False if disable_tqdm else "auto"
        with ProgressBar("generating", total=total, unit="text", show=show) as bar:
            for options, numbers in groups.items():
                for start in range(0, len(numbers), self._batch_size):
                    part = numbers[start : start + self._batch_size]
                    contexts = [requests[number].args[0] for number in part]
                    for number, text in zip(part, self._continue(contexts, json.loads(options)), strict=True):
                        texts[number] = text
                    bar.advance(len(part))
        return texts

    def _continue(self, contexts: Sequence[str], asked: dict[str, Any]) -> list[str]:
        default = min(_DEFAULT_NEW_TOKENS, self.max_length // 2)
        options, stops = generation_options(asked, default)
        room = self.max_length - options["max_dec_len"]
        if room < 1:
            raise ConfigError(
                f"a task asks for {options['max_dec_len']} new tokens, which leaves no room for a context in "
                f"the model's {self.max_length} positions (Model.max_position_embeddings)"
            )
        if options["decode_strategy"] != "beam_search":
            options["stop"] = tuple(stops) or None
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        results = self._generator.generate(prompts, _section(options), batch_rows=self._batch_size)
        # Beam search does not support stop strings, so cut the continuations here.
        return [_before(generations[0].text, stops) for generations in results]


def _section(options: dict[str, Any]) -> GenerationConfig:
    try:
        return section_of(GenerationConfig, options)
    except ConfigError as error:
        raise ConfigError(f"a task needs options that generation lacks ({options}): {error}") from error


def _before(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends, default=len(text))]


def generation_options(asked: Mapping[str, Any], max_new_tokens: int) -> tuple[dict[str, Any], list[str]]:
    """Translate the generation options of an lm-evaluation-harness task to options of our section
    ``Generation``. Returns these options, and the task's stop strings.

    Args:
        asked: the task's options for ``generate_until``.
        max_new_tokens: the limit on new tokens if the task sets none.

    Raises:
        ConfigError: the task uses an option that our generation does not have.
    """
    left = dict(asked)
    until = left.pop("until", None) or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    given = [left.pop(key) for key in ("max_gen_toks", "max_new_tokens") if key in left]
    temperature = float(left.pop("temperature", 0.0) or 0.0)
    samples = left.pop("do_sample", temperature > 0)
    options: dict[str, Any] = {"max_dec_len": int(given[0]) if given else max_new_tokens}
    options |= {ours: left.pop(theirs) for theirs, ours in _SAME_MEANING.items() if theirs in left}
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(f"a task asks for {name} = {value!r}, which generation does not have")
    beams = options.get("num_beams", 1) > 1
    if samples and beams:
        raise ConfigError(
            f"a task asks for num_beams = {options['num_beams']!r} and for sampling, which has no beams here"
        )
    if samples:
        drawn = {"decode_strategy": "sampling", "temperature": temperature or 1.0}
        return {"top_k": DEFAULTS["top_k"], **options, **drawn}, stops
    for key in ("top_k", "top_p", "min_p", "typical_p"):
        options.pop(key, None)
    if beams:
        options.setdefault("length_penalty", DEFAULTS["length_penalty"])
    return {**options, "decode_strategy": "beam_search" if beams else "greedy_search"}, stops
