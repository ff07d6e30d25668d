"""``ppfleetx plan``: from arguments to predictions, from predictions to text, JSON and files."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.plan import AXES, ParallelPlan, violations
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.planner.alternatives import why_not
from ppfleetx.planner.calibration import calibrate
from ppfleetx.planner.cards import Card, card_names, load_card
from ppfleetx.planner.case import Case, case_of
from ppfleetx.planner.configured import Written, read_written, write_config
from ppfleetx.planner.long_run import Questions, add_question_arguments, answers, questions_of
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.plan_words import WORDS, read_words
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.report import account, constants, ranking
from ppfleetx.planner.search import Found, search

_ANY_CARD = "A100-80GB"


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes beside ``-c`` and ``-o``."""
    parser.add_argument("--devices", type=int, metavar="N", help="cards; without --plan, all plans of them")
    parser.add_argument(
        "--card",
        metavar="NAME",
        help=f"{', '.join(card_names())}, or a YAML file (default: Global.card, else {_ANY_CARD})",
    )
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="cards of a node (default 8)")
    parser.add_argument(
        "--network-gbps",
        type=float,
        metavar="X",
        help="network of a node in all, in Gbit/s (else the card's)",
    )
    parser.add_argument(
        "--rank-order",
        metavar="pp,dp,...",
        help=f"how ranks are numbered, nearest neighbours last (default {','.join(AXES)}, as this engine "
        "does; another program's for its published runs)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="sequences a step (else the YAML's)")
    parser.add_argument(
        "--goal", choices=("time", "memory"), default="time", help="what the best has least of"
    )
    parser.add_argument(
        "--plan", metavar="dp=4,mp=8,...", help=f"one plan instead of all: {', '.join(WORDS)}"
    )
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="PLAN",
        help="the whole account of PLAN, of --plan, or of the best",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--write", metavar="FILE", help="the configuration under the plan, or the best, to FILE"
    )
    parser.add_argument(
        "--report", metavar="DIR", help="pictures and one HTML page of the plan, or of the best"
    )
    parser.add_argument(
        "--calibrate",
        metavar="RUN_DIR",
        action="append",
        default=[],
        help="fit the card to the step times of a run of yours; several times for several runs",
    )
    parser.add_argument("--write-card", metavar="FILE", help="the calibrated card to FILE, for --card")
    add_question_arguments(parser)


def run_plan(args: argparse.Namespace) -> str:
    """What the command prints.

    Raises:
        ConfigError: an argument or the plan is not valid.
    """
    written = read_written(args.config, args.override)
    card = load_card(args.card or written.cfg.Global.card or _ANY_CARD)
    calibration = ""
    cluster = _cluster(args, card)
    if args.calibrate:
        card, calibration = calibrate(args.calibrate, cluster, args.write_card)
        cluster = replace(cluster, card=card)
    elif args.write_card:
        raise ConfigError("is written by --calibrate RUN_DIR", key="--write-card", value=args.write_card)
    words = _words(args)
    questions = questions_of(args)
    if words is not None or args.devices is None:
        cfg, prediction = _one(written, words or "", args, cluster)
        found = None
    else:
        found = _all(written, args, cluster)
        prediction = found.best[0] if found.best else None
        cfg = _config_of(written, prediction) if prediction and args.write else None
    if prediction is not None:
        _files(args, cfg, prediction, found)
    if args.json:
        calibrated = {"calibration": calibration.splitlines()} if calibration else {}
        return json.dumps({**_json(written, prediction, found, questions, args), **calibrated})
    lines = [*([calibration] if calibration else []), _text(args, prediction, found, cluster)]
    if prediction is not None:
        lines += answers(prediction, _tokens(written, prediction, args), questions)
        if found is not None:
            lines += ["", "Why not", *(f"- {sentence}" for sentence in why_not(prediction))]
        lines += ["", constants(cluster)]
    return "\n".join(lines)


def _words(args: argparse.Namespace) -> str | None:
    """The plan named by ``--plan`` or ``--explain``."""
    if args.plan is not None and args.explain:
        raise ConfigError("names a plan, and --plan does too; give one", key="--explain", value=args.explain)
    return args.plan if args.plan is not None else (args.explain or None)


def _cluster(args: argparse.Namespace, card: Card) -> Cluster:
    network = 0.0 if args.network_gbps is None else _positive(args.network_gbps, "--network-gbps") * 1e9 / 8
    return Cluster(card, int(_positive(args.per_node, "--per-node")), network, _axes(args.rank_order))


def _axes(words: str | None) -> tuple[str, ...]:
    if words is None:
        return AXES
    axes = tuple(word.strip() for word in words.split(","))
    if sorted(axes) != sorted(AXES):
        raise ConfigError(f"must name each of {', '.join(AXES)} once", key="--rank-order", value=words)
    return axes


def _one(
    written: Written, words: str, args: argparse.Namespace, cluster: Cluster
) -> tuple[RunConfig, Prediction]:
    """The configuration under the plan ``words``; whatever they do not name stays."""
    named = read_words(words, written.plan)
    plan, batch = named.plan, _batch(written, args)
    if args.devices is not None and plan.world_size != args.devices:
        raise ConfigError(
            f"the plan is of {plan.world_size} cards, not of {args.devices}", key="--plan", value=words
        )
    micro = named.micro or written.micro_batch()
    if batch % (plan.data_size * micro):
        raise ConfigError(
            f"{batch} sequences a step cannot be dealt out to {plan.data_size} data ranks (dp x sharding) in "
            f"micro batches of {micro}",
            key="--plan" if words else "--batch",
            value=words or batch,
        )
    whole = case_of(written.under(ParallelPlan(), 1, batch, named.recompute), cluster.card)
    work = replace(whole.workload, accumulate_steps=batch // (plan.data_size * micro))
    broken = violations(plan, work)
    if broken:
        raise ConfigError(broken[0].sentence, key="--plan", value=words)
    cfg = written.under(plan, micro, batch, named.recompute)
    return cfg, Prediction(case_of(cfg, cluster.card), cluster)


def _all(written: Written, args: argparse.Namespace, cluster: Cluster) -> Found:
    devices = int(_positive(args.devices, "--devices"))
    whole = case_of(written.under(ParallelPlan(), 1, _batch(written, args), None), cluster.card)
    return search(whole, cluster, devices, goal=args.goal)


def _batch(written: Written, args: argparse.Namespace) -> int:
    return written.batch() if args.batch is None else int(_positive(args.batch, "--batch"))


def _config_of(written: Written, prediction: Prediction) -> RunConfig:
    case = prediction.case
    return written.under(case.plan, case.micro_batch, case.global_batch, case.recomputed[0])


def _files(
    args: argparse.Namespace, cfg: RunConfig | None, prediction: Prediction, found: Found | None
) -> None:
    if args.write:
        write_config(cfg, prediction.case, Path(args.write))
    if args.report:
        from ppfleetx.planner.pictures import write_report

        write_report(Path(args.report), prediction, found)


def _tokens(written: Written, prediction: Prediction, args: argparse.Namespace) -> float:
    """Of the whole run: ``--tokens``, or the configuration's steps."""
    return _run_tokens(written.cfg.Engine.max_steps, prediction.case, args.tokens)


def _run_tokens(steps: int, case: Case, tokens: float | None) -> float:
    return float(steps * case.tokens) if tokens is None else _positive(tokens, "--tokens")


def _json(
    written: Written,
    prediction: Prediction | None,
    found: Found | None,
    questions: Questions,
    args: argparse.Namespace,
) -> dict[str, object]:
    if found is None:
        return {
            **prediction.as_json(_tokens(written, prediction, args)),
            "what_if": questions.as_json(prediction),
            "constants": prediction.cluster.card.model_dump(),
        }
    plans = [one.as_json(_tokens(written, one, args)) for one in found.best]
    counts = {name: getattr(found, name) for name in ("too_large", "candidates", "fit", "unfit", "slower")}
    reasons = why_not(found.best[0]) if found.best else []
    return {"plans": plans, "legal": found.plans, **counts, "why_not": reasons}


def _text(
    args: argparse.Namespace, prediction: Prediction | None, found: Found | None, cluster: Cluster
) -> str:
    if found is None:
        return account(prediction)
    text = ranking(found, cluster, args.devices, args.goal)
    return f"{text}\n\n{account(prediction)}" if args.explain is not None and prediction else text


def _positive(value: float, key: str) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError("must be greater than 0", key=key, value=value)
    return value
