"""Implement ``ppfleetx plan``, which predicts memory and step time of parallel plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.commands.options import positive_int, refuse_not_positive
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.parallel_plan import AXES, ParallelPlan, violations
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.planner import ANY_CARD, shipped_cards
from ppfleetx.planner.alternatives import why_not
from ppfleetx.planner.calibration import calibrate
from ppfleetx.planner.cards import Card, load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import job_of
from ppfleetx.planner.plan_to_config import UnresolvedConfig, parse_plan, read_unresolved, write_config
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.report import account, constants, ranking
from ppfleetx.planner.run_cost import RunCostOptions, answers
from ppfleetx.planner.search import SearchResult, search

if TYPE_CHECKING:
    from ppfleetx.commands.train_verbs import Plan


def run(options: Plan) -> None:
    """Predict memory and step time of one plan or of all plans, print the predictions, and write the files
    that the options name."""
    refuse_not_positive(options, "price", "mtbf", "save_seconds", "restart_seconds", "network_gbps", "tokens")
    written = read_unresolved(options.config, options.override)
    card = load_card(options.card or written.cfg.Global.card or ANY_CARD)
    calibration = ""
    cluster = _cluster(options, card)
    if options.calibrate:
        card, calibration = calibrate(options.calibrate, cluster, options.write_card)
        cluster = replace(cluster, card=card)
    elif options.write_card:
        raise ConfigError("--write-card needs --calibrate RUN_DIR")
    words = _words(options)
    questions = _questions_of(options)
    if words is not None or options.devices is None:
        cfg, prediction = _predict_one_plan(written, words or "", options, cluster)
        found = None
    else:
        whole = job_of(written.under(ParallelPlan(), 1, _batch(written, options), None), cluster.card)
        found = search(whole, cluster, options.devices, goal=options.goal)
        prediction = found.best[0] if found.best else None
        cfg = None
        if prediction is not None and options.write:
            job = prediction.job
            cfg = written.under(job.plan, job.micro_batch, job.global_batch, job.recomputed[0])
    if prediction is not None:
        _files(options, cfg, prediction)
    asked = "--write" if options.write else "--report" if options.report else None
    if prediction is None and asked is not None:
        raise ConfigError(
            f"there is nothing to write: {_text(options, None, found, cluster).splitlines()[-1]}",
            key=asked,
            value=options.write or options.report,
        )
    if options.json:
        calibrated = {"calibration": calibration.splitlines()} if calibration else {}
        print(json.dumps({**_json(written, prediction, found, questions, options), **calibrated}))
        return
    lines = [*([calibration] if calibration else []), _text(options, prediction, found, cluster)]
    if prediction is not None:
        lines += answers(prediction, _tokens(written, prediction, options), questions)
        if found is not None:
            lines += ["", "Why not", *(f"- {sentence}" for sentence in why_not(prediction))]
        lines += ["", constants(cluster)]
    print("\n".join(lines))


def _questions_of(options: Plan) -> RunCostOptions:
    ramp = None if options.ramp is None else _numbers(options.ramp, "--ramp")
    if ramp is not None and len(ramp) != 3:
        raise ConfigError("takes three numbers: START,STEP,SAMPLES", key="--ramp", value=options.ramp)
    scale = () if options.scale is None else _numbers(options.scale, "--scale")
    return RunCostOptions(
        options.price, options.mtbf, options.save_seconds, options.restart_seconds, scale, ramp
    )


def _numbers(text: str, key: str) -> tuple[int, ...]:
    numbers = tuple(positive_int(part.strip()) for part in text.split(","))
    if None in numbers:
        raise ConfigError("takes integers of at least 1, separated by commas", key=key, value=text)
    return numbers


def _words(options: Plan) -> str | None:
    if options.plan is not None and options.explain:
        raise ConfigError(
            "names a plan, and --plan does too; give one", key="--explain", value=options.explain
        )
    return options.plan if options.plan is not None else (options.explain or None)


def _cluster(options: Plan, card: Card) -> Cluster:
    network = (options.network_gbps or 0.0) * 1e9 / 8
    return Cluster(card, options.per_node, network, _axes(options.rank_order))


def _axes(words: str | None) -> tuple[str, ...]:
    if words is None:
        return AXES
    axes = tuple(word.strip() for word in words.split(","))
    if sorted(axes) != sorted(AXES):
        raise ConfigError(f"must name each of {', '.join(AXES)} once", key="--rank-order", value=words)
    return axes


def _predict_one_plan(
    written: UnresolvedConfig, words: str, options: Plan, cluster: Cluster
) -> tuple[RunConfig, Prediction]:
    """Apply the plan ``words``, such as ``dp=4,mp=8``, to the configuration. Returns the configuration and
    the prediction for it. Degrees that ``words`` does not name stay as configured.
    """
    option = "--plan" if options.plan is not None else "--explain"
    named = parse_plan(words, written.plan, option)
    plan, batch = named.plan, _batch(written, options)
    if options.devices is not None and plan.world_size != options.devices:
        raise ConfigError(
            f"the plan uses {plan.world_size} cards, not {options.devices}", key=option, value=words
        )
    micro = named.micro or written.micro_batch()
    if batch % (plan.data_size * micro):
        raise ConfigError(
            f"{batch} sequences a step cannot be split among {plan.data_size} data ranks (dp x sharding) in "
            f"micro batches of {micro}",
            key=option if words else "--batch",
            value=words or batch,
        )
    whole = job_of(written.under(ParallelPlan(), 1, batch, named.recompute), cluster.card)
    work = replace(whole.workload, accumulate_steps=batch // (plan.data_size * micro))
    broken = violations(plan, work)
    if broken:
        raise ConfigError(broken[0].rule, key=option, value=words)
    cfg = written.under(plan, micro, batch, named.recompute)
    return cfg, Prediction(job_of(cfg, cluster.card), cluster)


def _batch(written: UnresolvedConfig, options: Plan) -> int:
    return written.batch() if options.batch is None else options.batch


def _files(options: Plan, cfg: RunConfig | None, prediction: Prediction) -> None:
    if options.write:
        if options.card is not None:
            card = options.card if options.card in shipped_cards() else str(Path(options.card).resolve())
            sizes = cfg.Global.model_copy(update={"card": card})
            cfg = cfg.model_copy(update={"Global": sizes})
        write_config(cfg, prediction.job, Path(options.write))
    if options.report:
        from ppfleetx.planner.plots import write_report

        write_report(Path(options.report), prediction)


def _tokens(written: UnresolvedConfig, prediction: Prediction, options: Plan) -> float:
    """Return the number of training tokens of the whole run: ``--tokens`` or, if that is not given,
    ``Engine.max_steps`` times the tokens per step."""
    if options.tokens is not None:
        return options.tokens
    return float(written.cfg.Engine.max_steps * prediction.job.tokens)


def _json(
    written: UnresolvedConfig,
    prediction: Prediction | None,
    found: SearchResult | None,
    questions: RunCostOptions,
    options: Plan,
) -> dict[str, object]:
    if found is None:
        return {
            **prediction.as_json(_tokens(written, prediction, options)),
            "what_if": questions.as_json(prediction),
            "constants": prediction.cluster.card.model_dump(),
        }
    plans = [one.as_json(_tokens(written, one, options)) for one in found.best]
    counts = {name: getattr(found, name) for name in ("too_large", "candidates", "fit", "unfit", "slower")}
    reasons = why_not(found.best[0]) if found.best else []
    return {"plans": plans, "legal": found.plans, **counts, "why_not": reasons}


def _text(options: Plan, prediction: Prediction | None, found: SearchResult | None, cluster: Cluster) -> str:
    if found is None:
        return account(prediction)
    text = ranking(found, cluster, options.devices, options.goal)
    return f"{text}\n\n{account(prediction)}" if options.explain is not None and prediction else text
