"""Implement ``ppfleetx eval``: loss on ``Data.Eval``, or perplexity or cloze accuracy on ``Offline_Eval``."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.commands.generate import check_checkpoint, find_tokenizer
from ppfleetx.commands.initialize import made_directory, start_with
from ppfleetx.config.loader import read_config
from ppfleetx.config.reading.overrides import Setting, overridden_keys
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.device_errors import OF_EVALUATION, explained_device_errors
from ppfleetx.core.engine.training_watchdog import EVALUATION_DIR, watched
from ppfleetx.data.tasks.evaluation import (
    LastWords,
    SlidingWindows,
    num_batches,
    read_evaluation_set,
    read_text,
    window_batches,
)
from ppfleetx.data.tokenizer.tokenizer import check_tokenizer
from ppfleetx.models.evaluator import perplexity
from ppfleetx.resilience.progress import EVALUATING, PROGRESS
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.output_files import atomic_write, writing
from ppfleetx.utils.progress_bar import track

if TYPE_CHECKING:
    from ppfleetx.commands.model_verbs import Evaluate, ModelSource
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.parallel.step_runner import StepRunner

RESULT_FILE = "eval_result.json"


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a text.

    Attributes:
        file: path of the text.
        detokenizer: name of the detokenization rules that were applied before the text was encoded.
        num_tokens: the number of tokens.
        num_words: the number of words in the file. Words are separated by single spaces.
        loss: the mean negative log probability of all tokens but the first, in nats.
        ppl: exp(loss), the perplexity per token.
        token_ratio: (num_tokens - 1) / (num_words - 1); NaN for a text of one word.
        adjusted_ppl: exp(loss x token_ratio), the perplexity per word.
    """

    file: str
    detokenizer: str
    num_tokens: int
    num_words: int
    loss: float
    ppl: float
    token_ratio: float
    adjusted_ppl: float


@dataclass(frozen=True)
class Accuracy:
    """How often a model predicts the last word of a text (a cloze test such as LAMBADA).

    Attributes:
        file: path of the file with the texts.
        strict: whether the model must predict all tokens of the last word, not only the last one.
        num_examples: the number of texts.
        num_correct: the number of texts whose last word is predicted; NaN if a logit was not finite.
        accuracy: num_correct / num_examples.
    """

    file: str
    strict: bool
    num_examples: int
    num_correct: float
    accuracy: float


Result = Perplexity | Accuracy


def run(options: Evaluate) -> None:
    module = [] if options.text is None else [Setting("Model.module", "GPTEvalModule", "--text")]
    with options.job(*module) as job:
        window = [] if options.text is None else _shorter_windows(job)
        run_loaded(job.load(*window))


def _shorter_windows(job: ModelSource) -> list[Setting]:
    """Return settings that shorten the evaluation's windows to the model's context length. The list is empty
    if the windows fit already, or if the user set their length.
    """
    cfg, origins, _ = read_config(job.config, job.overrides)
    positions, window = cfg.Model.max_position_embeddings, cfg.Offline_Eval.max_seq_len
    if positions >= window or "Offline_Eval.max_seq_len" in overridden_keys(job.overrides):
        return []
    place = origins.get("Model.max_position_embeddings", "--text")
    return [
        Setting("Offline_Eval.max_seq_len", positions, place),
        Setting("Offline_Eval.overlapping_eval", min(cfg.Offline_Eval.overlapping_eval, positions), place),
    ]


def run_loaded(cfg: RunConfig) -> None:
    """Evaluate the checkpoint that a loaded configuration names, and print the result."""
    if cfg.Model.task.offline_evaluation:
        _run_offline(cfg)
        return
    cfg, ctx = start_with(cfg, reads=("Eval", "Test"))
    from ppfleetx.commands.train import evaluate as evaluate_on_corpus

    evaluate_on_corpus(cfg, ctx)


def _run_offline(cfg: RunConfig) -> None:
    check_plan(cfg)
    read_text(cfg.Offline_Eval, cfg.origins.get("Offline_Eval.eval_path"))
    check_checkpoint(cfg)
    windows = read_windows(cfg)
    directory = made_directory(cfg, "Engine.save_load.output_dir")
    cfg, ctx = start_with(cfg)
    result, about = evaluate(cfg, ctx, windows)
    if ctx.is_main:
        print(table(result), flush=True)
        write(directory / RESULT_FILE, result, about)


def check_plan(cfg: RunConfig) -> None:
    """Raise ConfigError if the plan splits sequences (``sep_degree``) while ``cloze_eval`` is set. To predict
    the last word of a text, a rank must have all tokens of the word."""
    if cfg.Offline_Eval.cloze_eval and cfg.plan.sep > 1:
        raise cfg.error(
            "Distributed.sep_degree",
            "cloze_eval: True needs ranks that have all tokens of a word; use dp_degree or mp_degree instead "
            "(a checkpoint of any plan loads)",
        )


def read_windows(cfg: RunConfig) -> SlidingWindows | LastWords:
    """Read and encode the file ``Offline_Eval.eval_path``. Returns sliding windows for the perplexity. With
    ``cloze_eval``, returns texts whose last word the model must predict."""
    checkpoint = open_resolved(resolve_checkpoint(cfg.Engine.save_load.ckpt_dir))
    tokenizer = find_tokenizer(cfg, checkpoint)
    check_tokenizer(tokenizer, cfg.Model.vocab_size, is_trained=True)
    return read_evaluation_set(cfg.Offline_Eval, tokenizer)


def evaluate(
    cfg: RunConfig, ctx: ParallelContext, windows: SlidingWindows | LastWords
) -> tuple[Result, dict[str, Any]]:
    """Score the encoded texts in ``windows`` with the checkpoint ``Engine.save_load.ckpt_dir``. Returns the
    result, which is the same on all ranks, and a dict that describes the evaluation, with keys such as
    ``checkpoint``, ``step`` and ``max_seq_len``."""
    from ppfleetx.commands.train import build_runner, find_weights

    with watched(cfg, ctx, EVALUATION_DIR), explained_device_errors(cfg, ctx, OF_EVALUATION):
        start = find_weights(cfg, ctx)
        runner = build_runner(cfg, ctx, train=False)
        start.restore_weights(runner, cfg.Model)
        PROGRESS.is_past_start = True
        started = time.perf_counter()
        total = sum_over_windows(runner, cfg, ctx, windows)
        result = result_of(cfg, windows, total)
        if not math.isfinite(total):
            get_logger().warning(f"logits of {start.checkpoint.path} are not finite, and so is the result")
        about: dict[str, Any] = {
            "checkpoint": str(start.checkpoint.path),
            "step": start.state.step,
            "max_seq_len": cfg.Offline_Eval.max_seq_len,
            "seconds": time.perf_counter() - started,
        }
        if not cfg.Offline_Eval.cloze_eval:
            about["overlapping_eval"] = cfg.Offline_Eval.overlapping_eval
        return result, about


def sum_over_windows(
    runner: StepRunner, cfg: RunConfig, ctx: ParallelContext, windows: SlidingWindows | LastWords
) -> float:
    """Score all windows. Returns a sum over all data-parallel ranks: the negative log probability for
    ``SlidingWindows``, or the number of correct predictions for ``LastWords``. The sum is NaN if a logit is
    not finite."""
    section = cfg.Offline_Eval
    # The plan splits each window into this many parts, so the length of a window must be a multiple of it.
    parts = cfg.plan.sep * (cfg.plan.mp if cfg.plan.sequence_parallel else 1)
    batches = window_batches(windows, section.batch_size, ctx.data_rank, ctx.data_size, multiple_of=parts)
    num_steps = num_batches(windows, section.batch_size, ctx.data_size)
    total = scored = 0.0
    since = time.perf_counter()
    shown = track(batches, "evaluating", total=num_steps, unit="batch", show="auto" if ctx.is_main else False)
    for step, batch in enumerate(shown, 1):
        PROGRESS.beat(EVALUATING)
        found = runner.eval_step([batch])
        is_broken = found.metrics["non_finite"].total > 0
        total, scored = total + (math.nan if is_broken else found.loss), scored + found.count
        if step % section.logging_freq == 0 or step == num_steps:
            now = time.perf_counter()
            speed = ((step - 1) % section.logging_freq + 1) / (now - since)
            done = min(step * section.batch_size * ctx.data_size, len(windows))
            so_far = f"number correct: {total:.0f}" if section.cloze_eval else f"loss: {total / scored:.9f}"
            get_logger().info(
                f"[eval] batch: {step}/{num_steps}, windows: {done}/{len(windows)}, {so_far}, "
                f"speed: {speed:.2f} batch/s"
            )
            since = now
    if isinstance(windows, SlidingWindows):
        assert scored == windows.num_scored, "each token but the first counts once"
    return total


def result_of(cfg: RunConfig, windows: SlidingWindows | LastWords, total: float) -> Result:
    """Compute the perplexity (for ``SlidingWindows``) or the accuracy (for ``LastWords``). ``total`` is the
    result of :func:`sum_over_windows` for these ``windows``."""
    section = cfg.Offline_Eval
    if isinstance(windows, LastWords):
        share = total / len(windows)
        return Accuracy(section.eval_path, section.cloze_strict, len(windows), total, share)
    loss = total / windows.num_scored
    ratio = windows.num_scored / (windows.num_words - 1) if windows.num_words > 1 else math.nan
    return Perplexity(
        file=section.eval_path,
        detokenizer=windows.detokenizer,
        num_tokens=windows.ids.size,
        num_words=windows.num_words,
        loss=loss,
        ppl=perplexity(loss),
        token_ratio=ratio,
        adjusted_ppl=perplexity(loss * ratio),
    )


def table(result: Result) -> str:
    """Format an evaluation's result as a table. Each row has the name and the value of one field."""
    rows = {name.replace("_", " "): _cell(value) for name, value in asdict(result).items()}
    width = max(len(name) for name in rows)
    rule = "-" * (width + 2 + max(len(cell) for cell in rows.values()))
    return "\n".join([rule, *(f"{name:<{width}}  {cell}" for name, cell in rows.items()), rule])


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.9g}"


def write(path: Path, result: Result, about: dict[str, Any]) -> None:
    """Write an evaluation's result to the file ``path`` as JSON. ``about`` has further keys, such as the
    checkpoint's step. Numbers that are not finite become null."""
    kind = "perplexity" if isinstance(result, Perplexity) else "cloze"
    values = {"kind": kind, **asdict(result), **about}
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    with writing("Engine.save_load.output_dir", path), atomic_write(path, "w") as file:
        file.write(json.dumps(plain, indent=2) + "\n")
