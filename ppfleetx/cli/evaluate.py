"""Evaluate a checkpoint.

With the configuration of pretraining, which the checkpoint holds: token-weighted loss and perplexity on
Data.Eval. With --text, or Model.module: GPTEvalModule: perplexity of a text file, or accuracy of last words
(Offline_Eval, docs/evaluation.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ppfleetx.cli.launching import add_launch_arguments
from ppfleetx.cli.model_arguments import Job, add_model_arguments, job_of

EXAMPLES = """\
examples:
  ppfleetx eval output
  ppfleetx eval output --text wiki.test.tokens
  ppfleetx eval -c gpt/eval_gpt_345M_single_card -o Engine.save_load.ckpt_dir=output
"""
INTERMIXED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    add_model_arguments(parser)
    add_launch_arguments(parser)
    parser.add_argument("--text", metavar="FILE", help="perplexity of this text (Offline_Eval.eval_path)")
    parser.add_argument(
        "--output", metavar="DIR", help="where results are written (Engine.save_load.output_dir)"
    )


def run(args: argparse.Namespace) -> None:
    """Evaluate and print the result."""
    from ppfleetx.commands.evaluate import run as run_program
    from ppfleetx.commands.resolve_model import override

    more = [] if args.output is None else [override("Engine.save_load.output_dir", args.output, "--output")]
    if args.text is not None:
        given = {"Model.module": "GPTEvalModule", "Offline_Eval.eval_path": args.text}
        more += [override(key, value, "--text") for key, value in given.items()]
    with job_of(args, *more) as job:
        run_program(job.config, [*job.overrides, *(_window(job) if args.text is not None else ())])


def _window(job: Job) -> Sequence[str]:
    """Windows that are no longer than the model's positions, where nobody chose them."""
    from ppfleetx.config.loader import read_config
    from ppfleetx.config.reading.overrides import Override

    cfg, origins, _ = read_config(job.config, job.overrides)
    given = {text.partition("=")[0].strip() for text in job.overrides}
    positions, window = cfg.Model.max_position_embeddings, cfg.Offline_Eval.max_seq_len
    if positions >= window or "Offline_Eval.max_seq_len" in given:
        return ()
    moves = min(cfg.Offline_Eval.overlapping_eval, positions)
    place = origins.get("Model.max_position_embeddings", "--text")
    return (
        Override(f"Offline_Eval.max_seq_len={positions}", place),
        Override(f"Offline_Eval.overlapping_eval={moves}", place),
    )
