#!/usr/bin/env python3
"""Write the computed parts of docs/planner.md: results of the planner, and memory of the shipped recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.planner.alternatives import memory_savings, why_not
from ppfleetx.planner.cards import GIB, load_card
from ppfleetx.planner.communication import Cluster
from ppfleetx.planner.job import Job, job_of
from ppfleetx.planner.plan_to_config import read_unresolved
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.search import search
from tools.site.pages import filled_page, write_files

TOOL = "tools/gen_planner_docs.py"
_CONFIGS = _ROOT / "ppfleetx/configs/nlp/gpt"
_EXAMPLES = (
    ("1.3B", "pretrain_gpt_1.3B_dp8", 8, "V100-32GB"),
    ("13B", "pretrain_gpt_13B_dp8", 32, "A100-80GB"),
    ("175B", "pretrain_gpt_175B_mp8_pp16", 128, "A100-80GB"),
)
_RECIPES = (
    "pretrain_gpt_345M_single_card",
    "pretrain_gpt_345M_mp8_qat",
    "pretrain_gpt_1.3B_single_card",
    "pretrain_gpt_1.3B_dp8",
    "pretrain_gpt_6.7B_sharding16",
    "pretrain_gpt_175B_mp8_pp16",
)
_SMALL, _LARGE = "V100-16GB", "V100-32GB"


def blocks() -> dict[str, str]:
    """Return the text of each generated block, by name."""
    return {"answers": answers(), "recipes": recipes(), "ascend": sources(("910B-64GB", "910C-64GB"))}


def sources(cards: Iterable[str]) -> str:
    """Return a list of the sources of each card's numbers. It also says which numbers are guesses."""
    lines = []
    for name in cards:
        card = load_card(name)
        lines += [f"- `{name}`", *(f"  - {source}" for source in card.sources)]
    return "\n".join(lines)


def answers() -> str:
    """Return a table of the best plan of each example, and the reasons against other plans."""
    lines = ["| model and cards | first plan | step | likely up to | MFU |", "|---|---|---|---|---|"]
    losers = []
    for model, config, devices, card in _EXAMPLES:
        cluster = Cluster(load_card(card))
        best = search(_job(config, ParallelPlan(), cluster), cluster, devices, keep=1).best[0]
        where = f"{model} on {devices:,} {card}"
        cells = (_plan(best.job), _seconds(best.time.seconds), _seconds(best.likely_at_most))
        lines.append(f"| {where} | {' | '.join(cells)} | {best.mfu:.0%} |")
        losers.append(f"- {where}. {' '.join(why_not(best)[:3])}")
    return "\n".join([*lines, "", "Why others lose:", "", *losers])


def recipes() -> str:
    """Return a table of the memory, in GiB, that each recipe needs on a large card, and that it needs on a
    small card with half the hidden size."""
    head = f"| recipe | of {_LARGE} | half the hidden size, of {_SMALL} |"
    return "\n".join([head, "|---|---|---|", *map(_recipe, _RECIPES)])


def _recipe(config: str) -> str:
    width = read_unresolved(_CONFIGS / f"{config}.yaml", []).cfg.Model.hidden_size
    cells = [_needs(config, _LARGE), _needs(config, _SMALL, [f"Model.hidden_size={width // 2}"])]
    return f"| `{config}` | {' | '.join(cells)} |"


def _needs(config: str, card: str, overrides: Iterable[str] = ()) -> str:
    cluster = Cluster(load_card(card))
    prediction = Prediction(_job(config, None, cluster, overrides), cluster)
    words = f"{prediction.fullest / GIB:.0f} GiB"
    if prediction.fits:
        return words
    room = cluster.card.memory_gib * GIB
    enough = [one for one in memory_savings(prediction) if prediction.fullest - one.saves <= room]
    ways = [f"with `{one.options}` {(prediction.fullest - one.saves) / GIB:.0f} GiB" for one in enough[:2]]
    return f"{words}: does **not** fit; " + ", ".join(ways)


def _job(config: str, plan: ParallelPlan | None, cluster: Cluster, overrides: Iterable[str] = ()) -> Job:
    written = read_unresolved(_CONFIGS / f"{config}.yaml", list(overrides))
    own = written.plan if plan is None else plan
    batch = written.batch()
    cfg = written.under(own, written.micro_batch() if plan is None else 1, batch, None)
    return job_of(cfg, cluster.card)


def _plan(job: Job) -> str:
    kinds = set(job.recomputed)
    recompute = "no recompute" if kinds == {"none"} else f"recomputing {', '.join(sorted(kinds))}"
    return f"{job.plan}; micro batch {job.micro_batch}, {recompute}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


if __name__ == "__main__":
    write_files(lambda: filled_page("planner.md", blocks(), TOOL), __doc__)
