"""The scheduler of the server: a thread that owns the model and runs all requests by continuous batching."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import paddle

from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.protocol import ApiError
from ppfleetx.deploy.server.scheduler_messages import (
    Embedded,
    Event,
    Failed,
    NewText,
    RunningSequence,
    Scored,
    Waiting,
    Work,
)
from ppfleetx.generation.adapters import Adapters
from ppfleetx.generation.continuous_batching import ContinuousBatch
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.prefix_cache import PrefixStore
from ppfleetx.generation.sampling import TokenScore, choose_tokens, embedding_of, score_prompt, score_tokens
from ppfleetx.generation.speculative_decoding import MOST_ROWS, best_draft_limit
from ppfleetx.utils.log import get_logger

_RETRY_SECONDS = 1


class ServedModel:
    """The running batch and the prefix cache of the base model, or of the base model with one LoRA adapter.
    ``name`` is the name of the base model or of the adapter in requests and metrics. ``max_prefix_tokens``
    is the size of the prefix cache in positions."""

    def __init__(self, model: NextTokenModel, name: str, max_prefix_tokens: int) -> None:
        self._model, self.name = model, name
        self.prefixes = PrefixStore(max_prefix_tokens)
        self.clear()

    def clear(self) -> None:
        self.batch, self.rows = ContinuousBatch(self._model, self.prefixes), list[RunningSequence]()

    def keep(self, kept: Sequence[bool]) -> None:
        """Keep sequence i in the batch if ``kept[i]`` is true, and remove it otherwise."""
        places = [place for place, stays in enumerate(kept) if stays]
        if len(places) < len(kept):
            self.batch.select(places)
            self.rows = [self.rows[place] for place in places]


class Scheduler:
    """Runs requests (:class:`Work`) on one model in a thread of its own, first come, first served. Nothing
    else may use the model while the thread runs. ``end_ids`` are the default end tokens of a request."""

    def __init__(
        self,
        model: NextTokenModel,
        tokenizer: Tokenizer,
        end_ids: tuple[int, ...],
        cfg: ServeConfig,
        metrics: Metrics,
        adapters: Adapters | None = None,
    ) -> None:
        self._model, self._tokenizer, self._cfg, self._metrics = model, tokenizer, cfg, metrics
        self.end_ids = end_ids
        self._changed = threading.Condition()  # guards the next four attributes; reentrant
        self._waiting: deque[Waiting] = deque()
        self._joining: list[Waiting] = []  # taken from the queue, and not in a batch yet
        self._closing_at: float | None = None
        self._died = False
        self._adapters = adapters or Adapters(model)
        names = (None, *self._adapters.names)
        room = cfg.prefix_cache_tokens // len(names)
        # The base model and each adapter have their own batch. The batches take turns within a step.
        self._models = {name: ServedModel(model, name or cfg.model_name, room) for name in names}
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- called by the HTTP side, in any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread that runs the model. It delivers events to the event loop ``loop``."""
        self._loop = loop
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """False once the thread that runs the model has failed."""
        return not self._died

    @property
    def is_closing(self) -> bool:
        return self._closing_at is not None

    @property
    def capacity(self) -> int:
        """The maximum number of waiting and running sequences."""
        return self._cfg.max_batch_size + self._cfg.max_waiting

    def submit(self, work: Work) -> None:
        """Put a request into the queue. Raises ApiError: 429 if the queue is full; 503 if the server is
        shutting down or has failed."""
        with self._changed:
            if self._died:
                raise ApiError(503, "the model has failed; see the server's log", code="unhealthy")
            if self._closing_at is not None:
                raise _closing()
            num_rows = sum(one.copies for one in (*self._waiting, *self._joining)) + len(self._rows)
            if num_rows + work.num_rows > self.capacity:
                raise ApiError(
                    429,
                    f"{num_rows} sequences are waiting or running, of at most {self.capacity} "
                    "(Serve.max_batch_size + Serve.max_waiting); try again later",
                    code="queue_full",
                    headers={"Retry-After": str(_RETRY_SECONDS)},
                )
            self._waiting.extend(Waiting(work, prompt) for prompt in work.prompts)
            self._show_waiting()
            self._changed.notify()

    def cancel(self, work: Work) -> None:
        """Cancel a request, for example because its client has disconnected. The sequences of the request
        are removed before the next step."""
        with self._changed:
            work.cancelled = True
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Stop accepting requests. The thread ends when the accepted requests are finished, or after
        ``seconds`` at the latest. Requests that are not finished by then fail. Can be called from a signal
        handler."""
        with self._changed:
            closing_at = time.monotonic() + seconds
            self._closing_at = min(closing_at, self._closing_at or closing_at)
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the thread to end. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread

    @property
    def _rows(self) -> list[RunningSequence]:
        return [row for model in self._models.values() for row in model.rows]

    def _run(self) -> None:
        try:
            with paddle.no_grad():
                while self._wait_for_work():
                    self._step()
        except BaseException:  # noqa: BLE001 any error ends the thread and fails all requests
            get_logger().exception("the model's thread has failed; no more requests can be answered")
            with self._changed:
                self._died = True
            error = ApiError(500, "the model has failed; see the server's log", code="model_failed")
        else:
            error = _closing()
        self._fail_all(error)

    def _wait_for_work(self) -> bool:
        """Return whether there are sequences to run. If there are none, waits for some. False means that the
        thread must end."""
        with self._changed:
            while not self._rows and not self._waiting:
                if self._closing_at is not None:
                    return False
                self._changed.wait()
            return self._closing_at is None or time.monotonic() < self._closing_at

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        for name, model in self._models.items():
            joins = bool(self._joining) and self._joining[0].prompt.adapter == name
            if joins or model.rows:
                with self._adapters.using(name):
                    self._step_of(model, joins=joins)

    def _step_of(self, model: ServedModel, *, joins: bool) -> None:
        joining = self._score_prompts() if joins else []
        if joining:
            model.batch.join([one.prompt.ids for one in joining], [one.copies for one in joining])
            with self._changed:
                model.rows += [
                    RunningSequence(one, copy, self._tokenizer)
                    for one in joining
                    for copy in range(one.copies)
                ]
                self._joining = []
        if not model.rows:
            return
        reused = model.prefixes.num_reused
        try:
            logits = self._next_logits(model, has_newcomers=bool(joining))
            tokens, events = self._choose(model.rows, logits)
        except Exception:  # noqa: BLE001 logged; requests in other models continue
            self._fail_step(model)
            return
        reused = model.prefixes.num_reused - reused
        self._metrics.prompt_tokens.labels(model.name).inc(
            sum(len(one.prompt.ids) for one in joining) - reused
        )
        self._metrics.reused_tokens.labels(model.name).inc(reused)
        self._metrics.generated_tokens.labels(model.name).inc(sum(map(len, tokens)))
        self._metrics.steps.labels(model.name).inc()
        model.batch.append(tokens)
        model.keep([not row.is_finished for row in model.rows])
        self._metrics.running.set(len(self._rows))
        self._metrics.prefix_tokens.set(sum(one.prefixes.num_tokens for one in self._models.values()))
        self._deliver(events)

    def _next_logits(self, model: ServedModel, *, has_newcomers: bool) -> paddle.Tensor:
        """Run one forward pass for a model's batch. Returns ``[1 + s, b, V]``: the logits after the last
        token of each sequence, then after each of its s draft tokens."""
        most = self._cfg.prompt_lookup_num_tokens
        if has_newcomers or not most or len(model.rows) > MOST_ROWS:
            return model.batch.next_logits().unsqueeze(0)
        limit = min(best_draft_limit([row.draft(most) for row in model.rows]), model.batch.max_drafts)
        for row in model.rows:
            row.drafts = row.drafts[:limit]
        return model.batch.logits_with_drafts([row.drafts for row in model.rows])

    def _choose(
        self, rows: Sequence[RunningSequence], logits: paddle.Tensor
    ) -> tuple[list[list[int]], list[tuple[Work, Event]]]:
        """Return the new tokens of each sequence, and the events for the clients. The new tokens are the
        accepted draft tokens and one more. ``logits`` is ``[1 + s, b, V]``: the logits after the last token
        of each sequence, then after each of its s draft tokens."""
        new: list[list[int]] = [[] for _ in rows]
        events: list[tuple[Work, Event]] = []
        active = list(range(len(rows)))
        for place in range(logits.shape[0]):
            here = logits[place]
            if len(active) < len(rows):
                here = here.index_select(paddle.to_tensor(active), axis=0)
            tokens = choose_tokens(here, [rows[i].choice() for i in active])
            scores = self._scores(here, [rows[i] for i in active], tokens)
            right = []
            for i, token, score in zip(active, tokens, scores, strict=True):
                row = rows[i]
                events.append((row.work, row.take(token, score)))
                new[i].append(token)
                if not row.is_finished and place < len(row.drafts) and row.drafts[place] == token:
                    right.append(i)
            active = right
            if not active:
                break
        for row, tokens in zip(rows, new, strict=True):
            row.adapt_drafts(len(tokens) - 1, self._cfg.prompt_lookup_num_tokens)
        return new, events

    def _scores(
        self, logits: paddle.Tensor, rows: Sequence[RunningSequence], tokens: Sequence[int]
    ) -> list[TokenScore | None]:
        scores: list[TokenScore | None] = [None] * len(rows)
        wants = [place for place, row in enumerate(rows) if row.prompt.num_top is not None]
        if wants:
            part = logits.index_select(paddle.to_tensor(wants), axis=0)
            most = max(rows[place].prompt.num_top or 0 for place in wants)
            found = score_tokens(part, [tokens[place] for place in wants], most)
            for place, score in zip(wants, found, strict=True):
                scores[place] = replace(score, top=score.top[: rows[place].prompt.num_top])
        return scores

    def _score_prompts(self) -> list[Waiting]:
        """Compute log-probabilities and embeddings for new prompts that ask for them, and send them to the
        clients. Returns the prompts for which tokens must be generated."""
        going_on, events = [], []
        for one in self._joining:
            read = self._metrics.prompt_tokens.labels(self._models[one.prompt.adapter].name)
            try:
                if one.prompt.scores_prompt:
                    scores = score_prompt(self._model, one.prompt.ids, one.prompt.num_top or 0)
                    read.inc(len(one.prompt.ids))
                    events.append((one.work, Scored(one.prompt.prompt_index, scores)))
                if one.prompt.is_embedded:
                    vector = embedding_of(self._model, one.prompt.ids)
                    read.inc(len(one.prompt.ids))
                    events.append((one.work, Embedded(one.prompt.prompt_index, vector)))
            except Exception:  # noqa: BLE001 logged; other requests continue
                get_logger().exception("the scores or the embedding of a prompt could not be computed")
                one.work.cancelled = True
                events.append((one.work, Failed(_failed_step())))
            if one.prompt.max_new_tokens and not one.work.cancelled:
                going_on.append(one)
                continue
            rows = range(one.prompt.first_index, one.prompt.first_index + one.copies)
            events += [(one.work, NewText(index, "", "length", num_tokens=0)) for index in rows]
        with self._changed:
            self._joining = going_on
        self._deliver(events)
        return going_on

    def _drop_cancelled(self) -> None:
        with self._changed:
            self._waiting = deque(one for one in self._waiting if not one.work.cancelled)
            self._show_waiting()
        for model in self._models.values():
            model.keep([not row.work.cancelled for row in model.rows])
        self._metrics.running.set(len(self._rows))

    def _admit(self) -> None:
        """Move prompts from the front of the queue to ``_joining``, as many as can join a batch now. They all
        use the same LoRA adapter, or all use none."""
        admitted = self._joining
        longest, num_rows = 0, len(self._rows)
        with self._changed:
            while self._waiting:
                one = self._waiting[0]
                longest = max(longest, len(one.prompt.ids))
                if num_rows + one.copies > self._cfg.max_batch_size:
                    break
                if admitted and longest * (len(admitted) + 1) > self._cfg.max_prefill_tokens:
                    break
                if admitted and one.prompt.adapter != admitted[0].prompt.adapter:
                    break
                num_rows += one.copies
                admitted.append(self._waiting.popleft())
            self._show_waiting()

    def _fail_step(self, model: ServedModel) -> None:
        """Fail all requests in a model's batch after an error in its step, and give the model an empty
        batch."""
        get_logger().exception("a step of %d sequences has failed", len(model.rows))
        failed = list(dict.fromkeys(row.work for row in model.rows))
        for work in failed:
            work.cancelled = True  # so that its waiting prompts do not start
        model.clear()
        self._metrics.running.set(len(self._rows))
        self._deliver((work, Failed(_failed_step())) for work in failed)

    def _fail_all(self, error: ApiError) -> None:
        with self._changed:
            self._closing_at = self._closing_at or time.monotonic()
            works = dict.fromkeys(one.work for one in (*self._waiting, *self._joining, *self._rows))
            self._waiting.clear()
            self._joining = []
            self._show_waiting()
        for model in self._models.values():
            model.clear()
        self._metrics.running.set(0)
        self._deliver((work, Failed(error)) for work in works)

    def _deliver(self, events: Iterable[tuple[Work, Event]]) -> None:
        """Pass the events of a step to the event loop's thread, all in one call."""
        assert self._loop is not None
        addressed = list(events)

        def hand_over() -> None:
            for work, event in addressed:
                if not work.cancelled or isinstance(event, Failed):
                    work.deliver(event)

        if addressed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(hand_over)

    def _show_waiting(self) -> None:
        self._metrics.waiting.set(sum(one.copies for one in self._waiting))


def _failed_step() -> ApiError:
    return ApiError(500, "the model has failed on this request; see the server's log", code="step_failed")


def _closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
