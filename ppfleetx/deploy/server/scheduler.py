"""The thread that owns the model: requests join and leave its batch between two steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from ppfleetx.config.sections.root import ServeConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.server.errors import ApiError
from ppfleetx.deploy.server.metrics import Metrics
from ppfleetx.deploy.server.work import Event, Failed, Job, Progress, Work
from ppfleetx.generation.continuous import ContinuousBatch, RowChoice, choose_tokens
from ppfleetx.generation.draws import RandomStream
from ppfleetx.generation.search import Row
from ppfleetx.generation.session import NextTokenModel
from ppfleetx.generation.text import RowText
from ppfleetx.utils.log import get_logger

_RETRY_SECONDS = 1


class Scheduler:
    """Answers :class:`Work` with one model, first come, first served.

    One step gives every sequence of the batch its next token. Before it, sequences whose request was
    cancelled leave, and waiting ones join as far as there is room. A thread without work sleeps.

    Args:
        model: gives the logits; nobody else uses it while the thread runs.
        tokenizer: of the model.
        end_ids: tokens that end an answer.
        cfg: limits.
        metrics: told of what happens.
    """

    def __init__(
        self,
        model: NextTokenModel,
        tokenizer: Tokenizer,
        end_ids: tuple[int, ...],
        cfg: ServeConfig,
        metrics: Metrics,
    ) -> None:
        self._model, self._tokenizer, self._cfg, self._metrics = model, tokenizer, cfg, metrics
        self._end_ids = end_ids
        self._changed = threading.Condition()  # guards the next four
        self._waiting: deque[_Waiting] = deque()
        self._num_rows = 0  # waiting and running, for the limit
        self._closing_at: float | None = None
        self._died = False
        self._batch = ContinuousBatch(model)
        self._rows: list[_Running] = []
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- called by the HTTP side, in any thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work; events are delivered in ``loop``."""
        self._loop = loop
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether the thread works, or has ended because it was told to."""
        return not self._died

    @property
    def is_closing(self) -> bool:
        return self._closing_at is not None

    @property
    def capacity(self) -> int:
        """Most sequences that can be waiting and running."""
        return self._cfg.max_batch_size + self._cfg.max_waiting

    def submit(self, work: Work) -> None:
        """Queue a request.

        Raises:
            ApiError: 429 the queue is full; 503 nothing is taken any more.
        """
        with self._changed:
            if self._died:
                raise ApiError(503, "the model has failed; see the server's log", code="unhealthy")
            if self._closing_at is not None:
                raise _closing()
            if self._num_rows + work.num_rows > self.capacity:
                raise ApiError(
                    429,
                    f"{self._num_rows} sequences are waiting or under way, of at most {self.capacity} "
                    "(Serve.max_batch_size + Serve.max_waiting); try again later",
                    code="queue_full",
                    headers={"Retry-After": str(_RETRY_SECONDS)},
                )
            self._num_rows += work.num_rows
            self._waiting.extend(_Waiting(work, job) for job in work.jobs)
            self._show_waiting()
            self._changed.notify()

    def cancel(self, work: Work) -> None:
        """Nobody waits for the answer any more: its sequences leave at the next step."""
        with self._changed:
            work.cancelled = True
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Take nothing more, and end after ``seconds`` at the latest; what is not finished then fails.

        A signal handler may call this: the lock lets a thread in that holds it already.
        """
        with self._changed:
            closing_at = time.monotonic() + seconds
            self._closing_at = min(closing_at, self._closing_at or closing_at)
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, at most so long; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            with paddle.no_grad():
                while self._has_work():
                    self._step()
        except BaseException:  # noqa: BLE001 whatever ends the thread, those who wait must hear of it
            get_logger().exception("the model's thread has ended; nothing can be answered any more")
            with self._changed:
                self._died = True
            error = ApiError(500, "the model has failed; see the server's log", code="model_failed")
        else:
            error = _closing()
        self._fail_all(error)

    def _has_work(self) -> bool:
        """Sleep until there is something to do; False: the time to close has come."""
        with self._changed:
            while not self._rows and not self._waiting:
                if self._closing_at is not None:
                    return False
                self._changed.wait()
            return self._closing_at is None or time.monotonic() < self._closing_at

    def _step(self) -> None:
        self._drop_cancelled()
        joining = self._admit()
        self._rows += [
            _Running(one, copy, self._tokenizer, self._model.vocab_size)
            for one in joining
            for copy in range(one.copies)
        ]
        self._batch.join([one.job.ids for one in joining], [one.copies for one in joining])
        if not self._rows:
            return
        try:
            logits = self._batch.next_logits()
            choices = map(self._choice, self._rows, self._batch.history)
            tokens = choose_tokens(logits, list(choices))
            events = [
                (row.work, row.take(token, self._end_ids))
                for row, token in zip(self._rows, tokens, strict=True)
            ]
        except Exception:  # noqa: BLE001 it is logged, and other requests are not to blame
            self._fail_step()
            return
        self._metrics.prompt_tokens.inc(sum(len(one.job.ids) for one in joining))
        self._metrics.generated_tokens.inc(len(tokens))
        self._metrics.steps.inc()
        self._batch.append([[token] for token in tokens])
        self._keep([not row.is_finished for row in self._rows])
        self._deliver(events)

    def _drop_cancelled(self) -> None:
        with self._changed:
            kept = [one for one in self._waiting if not one.work.cancelled]
            self._num_rows -= sum(one.copies for one in self._waiting) - sum(one.copies for one in kept)
            self._waiting = deque(kept)
            self._show_waiting()
        self._keep([not row.work.cancelled for row in self._rows])

    def _admit(self) -> list[_Waiting]:
        """Take from the queue what the batch and one prompt pass have room for; nothing overtakes."""
        admitted: list[_Waiting] = []
        longest, num_rows = 0, len(self._rows)
        with self._changed:
            while self._waiting:
                one = self._waiting[0]
                longest = max(longest, len(one.job.ids))
                if num_rows + one.copies > self._cfg.max_batch_size:
                    break
                if admitted and longest * (len(admitted) + 1) > self._cfg.max_prefill_tokens:
                    break
                num_rows += one.copies
                admitted.append(self._waiting.popleft())
            self._show_waiting()
        return admitted

    def _choice(self, row: _Running, history: Sequence[int]) -> RowChoice:
        forbidden = self._end_ids if row.num_new < row.job.min_new_tokens else ()
        return RowChoice(row.job.options, history, row.next_exponentials(), forbidden)

    def _keep(self, kept: list[bool]) -> None:
        """Let go of the other sequences."""
        if not all(kept):
            places = [place for place, stays in enumerate(kept) if stays]
            self._batch.select(places)
            self._rows = [self._rows[place] for place in places]
            with self._changed:
                self._num_rows -= len(kept) - len(places)
        self._metrics.running.set(len(self._rows))

    def _fail_step(self) -> None:
        """The model has raised: the requests of this step fail, and the others go on with a new batch."""
        get_logger().exception("a step of %d sequences has failed", len(self._rows))
        error = ApiError(
            500, "the model has failed on this request; see the server's log", code="step_failed"
        )
        failed = list(dict.fromkeys(row.work for row in self._rows))
        self._batch = ContinuousBatch(self._model)
        with self._changed:
            for work in failed:
                work.cancelled = True  # its other prompts need not begin
            self._num_rows -= len(self._rows)
        self._rows = []
        self._metrics.running.set(0)
        self._deliver((work, Failed(error)) for work in failed)

    def _fail_all(self, error: ApiError) -> None:
        with self._changed:
            self._closing_at = self._closing_at or time.monotonic()
            works = dict.fromkeys([*(one.work for one in self._waiting), *(row.work for row in self._rows)])
            self._waiting.clear()
            self._num_rows = 0
            self._show_waiting()
        self._rows = []
        self._metrics.running.set(0)
        self._deliver((work, Failed(error)) for work in works)

    def _deliver(self, events: Iterable[tuple[Work, Event]]) -> None:
        """Hand over the events of a step with one message to the event loop."""
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


def _closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


@dataclass(frozen=True, eq=False)
class _Waiting:
    work: Work
    job: Job

    @property
    def copies(self) -> int:
        return self.job.copies


class _Running:
    """One sequence of the batch: its text, its length and its random numbers."""

    def __init__(self, one: _Waiting, copy: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        job = one.job
        self.work, self.job = one.work, job
        self._index = job.first_index + copy
        self._row = Row(job.max_new_tokens)
        self._pieces: list[str] = []
        self._text = RowText(tokenizer, job.stops, job.ids, self._pieces.append)
        self._stream = (
            RandomStream(job.seed, job.number, copy, vocab_size) if job.options.temperature > 0 else None
        )

    @property
    def num_new(self) -> int:
        return len(self._row.ids)

    @property
    def is_finished(self) -> bool:
        return self._row.finish_reason is not None

    def next_exponentials(self) -> np.ndarray | None:
        return None if self._stream is None else self._stream.numbers(self.num_new)[0]

    def take(self, token: int, end_ids: tuple[int, ...]) -> Progress:
        """Add a token; what the client learns of it."""
        is_stopped = self._text.feed(token)
        if not self._row.add(token, is_last=token in end_ids or is_stopped):
            self._text.finish()
        text = "".join(self._pieces)
        self._pieces.clear()
        return Progress(self._index, text, self._row.finish_reason)
