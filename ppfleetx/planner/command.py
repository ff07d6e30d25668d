"""``tools/plan.py``: arguments to predictions, predictions to text or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.plan import ParallelPlan, violations
from ppfleetx.planner.cards import card_names, load_card
from ppfleetx.planner.case import Case, Recompute, case_of
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.report import account, ranking
from ppfleetx.planner.search import search

_DEGREES = {
    **{axis: axis for axis in ("dp", "mp", "pp", "sharding", "sep")},
    "stage": "sharding_stage",
    "vpp": "virtual_pp_degree",
}
_GRANULARITIES: tuple[Recompute, ...] = ("none", "core_attn", "full_attn", "full")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes beside ``-c`` and ``-o``."""
    parser.add_argument("--devices", type=int, metavar="N", help="cards; without --plan, all plans of them")
    parser.add_argument(
        "--card", default="A100-80GB", metavar="NAME", help=f"{', '.join(card_names())}, or a YAML file"
    )
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="cards of a node (default 8)")
    parser.add_argument(
        "--network-gbps",
        type=float,
        metavar="X",
        help="network of a node in all, in Gbit/s",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="sequences a step (else the YAML's)")
    parser.add_argument(
        "--goal", choices=("time", "memory"), default="time", help="what the best has least of"
    )
    parser.add_argument(
        "--plan",
        metavar="dp=4,mp=8,...",
        help="one plan instead of all: dp, mp, pp, sharding, stage, sep, vpp, micro, sp, offload, recompute",
    )
    parser.add_argument("--explain", action="store_true", help="the whole account of the plan or the best")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run_plan(args: argparse.Namespace) -> str:
    """What the command prints.

    Raises:
        ConfigError: an argument or a plan that cannot be.
    """
    card = load_card(args.card)
    network = 0.0 if args.network_gbps is None else _positive(args.network_gbps, "--network-gbps") * 1e9 / 8
    cluster = Cluster(card, int(_positive(args.per_node, "--per-node")), network)
    case = case_of(load_config(args.config, args.override), card)
    batch = args.batch or case.global_batch
    if args.plan is not None or args.devices is None:
        planned = _with_words(case, args.plan or "", batch, args.devices)
        prediction = Prediction(planned, cluster)
        return json.dumps(prediction.as_json()) if args.json else account(prediction)
    whole = replace(case, plan=ParallelPlan(), micro_batch=1, accumulate=batch)
    found = search(whole, cluster, int(_positive(args.devices, "--devices")), goal=args.goal)
    if args.json:
        plans = [prediction.as_json() for prediction in found.best]
        return json.dumps({"plans": plans, "legal": found.legal, "fit": found.fit})
    text = ranking(found, cluster, args.devices)
    return f"{text}\n\n{account(found.best[0])}" if args.explain and found.best else text


def _positive(value: float, key: str) -> float:
    if value <= 0:
        raise ConfigError("must be greater than 0", key=key, value=value)
    return value


def _with_words(case: Case, words: str, batch: int, devices: int | None) -> Case:
    """``case`` under the plan that ``words`` name; what they leave out stays."""
    given = _parse(words)
    plan, values = case.plan, {}
    for word, name in _DEGREES.items():
        if word in given:
            values[name] = _whole(given, word)
    for word, name in (("sp", "sequence_parallel"), ("offload", "sharding_offload")):
        if word in given:
            values[name] = _truth(given, word)
    if "pp" in values or "virtual_pp_degree" in values:
        values["pp_layers"] = None
    if "mp" in values and "sp" not in given and values["mp"] == 1:
        values["sequence_parallel"] = False
    plan = replace(plan, **values)
    micro = _whole(given, "micro") if "micro" in given else case.micro_batch
    if devices is not None and plan.world_size != devices:
        raise ConfigError(
            f"the plan is of {plan.world_size} cards, not of {devices}", key="--plan", value=words
        )
    if batch % (plan.data_size * micro):
        raise ConfigError(
            f"{batch} sequences a step cannot be dealt out to {plan.data_size} data ranks (dp x sharding) in "
            f"micro batches of {micro}",
            key="--plan",
            value=words,
        )
    recomputed = case.recomputed
    if "recompute" in given:
        if given["recompute"] not in _GRANULARITIES:
            raise ConfigError(f"recompute is one of {', '.join(_GRANULARITIES)}", key="--plan", value=words)
        recomputed = (given["recompute"],) * case.model.num_layers
    planned = replace(
        case,
        plan=plan,
        micro_batch=micro,
        accumulate=batch // (plan.data_size * micro),
        recomputed=recomputed,
    )
    broken = violations(plan, planned.workload)
    if broken:
        raise ConfigError("; ".join(v.sentence for v in broken), key="--plan", value=words)
    return planned


def _parse(words: str) -> dict[str, str]:
    known = (*_DEGREES, "micro", "sp", "offload", "recompute")
    given: dict[str, str] = {}
    for part in filter(None, words.split(",")):
        word, equals, value = part.strip().partition("=")
        if not equals or word not in known:
            raise ConfigError(f"must be {', '.join(known)} as word=value", key="--plan", value=part)
        if word in given:
            raise ConfigError(f"names {word} twice", key="--plan", value=words)
        given[word] = value.strip()
    return given


def _whole(given: dict[str, str], word: str) -> int:
    text = given[word]
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
        raise ConfigError("must be an integer of at least 1", key=f"--plan {word}", value=text)
    return int(text)


def _truth(given: dict[str, str], word: str) -> bool:
    if given[word] not in ("0", "1"):
        raise ConfigError("must be 0 or 1", key=f"--plan {word}", value=given[word])
    return given[word] == "1"
