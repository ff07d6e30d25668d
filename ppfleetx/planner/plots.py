"""Draw the pipeline's timeline, memory by part and step time by part on one HTML page."""

from __future__ import annotations

import base64
import html
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.memory import CARD_PARTS
from ppfleetx.planner.plan_to_config import plan_text
from ppfleetx.planner.prediction import Prediction
from ppfleetx.planner.report import account, constants
from ppfleetx.planner.step_time import step_time
from ppfleetx.planner.timeline import Span
from ppfleetx.utils.input_files import os_errors
from ppfleetx.utils.output_files import atomic_write, refuse_unwritable

_FORWARD, _BACKWARD, _AGAIN, _IDLE = "#4477aa", "#228833", "#ccbb44", "#dddddd"
_WEIGHTS = "#aa3377"
_PALETTE = (
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#882255",
    "#44aa99",
    "#999933",
)  # Paul Tol's, safe for color-blind readers
_MOST_SHOWN = 24  # micro batches in a timeline, or 2 pp if that is greater


@os_errors(ConfigError)
def write_report(directory: Path, prediction: Prediction) -> list[Path]:
    """Write each plot as PNG and SVG, and an ``index.html``. Returns the paths of all files.

    Raises:
        ConfigError: matplotlib is missing, or the directory holds a report already or cannot be written.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib: pip install 'ppfleetx[plots]'", key="--report", value=directory
        ) from None
    page = directory / "index.html"
    if page.exists():
        raise ConfigError(
            "there is a report already; nothing is overwritten", key="--report", value=directory
        )
    refuse_unwritable(directory, "--report")
    directory.mkdir(parents=True, exist_ok=True)
    pictures = [
        ("timeline", "The pipeline: who computes when", _draw_timeline),
        ("memory", "Memory of a device, by part and pipeline stage", _draw_memory),
        ("step", "Time of a step, by part, on the busiest stage", _draw_step),
    ]
    written, sections = [], []
    for name, words, draw in pictures if prediction.job.plan.pp > 1 else pictures[1:]:
        figure = Canvas(figsize=(11, 4.5), layout="constrained")
        draw(figure.add_subplot(), prediction)
        for ending in ("png", "svg"):
            path = directory / f"{name}.{ending}"
            figure.savefig(path, dpi=120, metadata={"Date": None} if ending == "svg" else None)
            written.append(path)
        sections.append(_section(words, directory / f"{name}.svg"))
    with atomic_write(page, "w") as file:
        file.write(_page(prediction, sections))
    return [*written, page]


def _draw_timeline(axes: Any, prediction: Prediction) -> None:
    """Draw when each pipeline stage computes. If a step has many micro batches, a step with fewer micro
    batches is drawn, so that each one is visible."""
    job, plan = prediction.job, prediction.job.plan
    count = min(job.accumulate, max(_MOST_SHOWN, 2 * plan.pp))
    count -= count % plan.pp if plan.virtual_pp_degree > 1 else 0
    shown = step_time(replace(job, accumulate=count), prediction.cluster, whole_timeline=True)
    spans, end = shown.timeline.spans, shown.timeline.seconds
    again = shown.parts["recompute"] / max(1e-12, sum(_backward_of(spans)))
    axes.broken_barh([(0, end)], (-0.5, plan.pp), facecolors=_IDLE, label="idle, or waiting for a message")
    for stage in range(plan.pp):
        mine = [span for span in spans if span.stage == stage]
        _bars(axes, stage, [span for span in mine if span.is_forward], _FORWARD)
        later = [span for span in mine if span.is_weights]
        backward = [span for span in mine if not span.is_forward and not span.is_weights]
        _bars(axes, stage, backward, _BACKWARD)
        _bars(axes, stage, later, _WEIGHTS)
        if again > 0.005:  # recomputation comes first in a backward pass
            starts = [(s.start, (s.end - s.start) * min(1.0, again)) for s in backward]
            axes.broken_barh(starts, (stage - 0.42, 0.84), facecolors=_AGAIN)
    axes.set(xlabel="seconds", ylabel="pipeline stage", xlim=(0, end), ylim=(plan.pp - 0.5, -0.5))
    axes.set_title(
        f"{count} of {job.accumulate} micro batches; over the whole step {prediction.time.bubble:.1%} is idle"
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    _legend(axes, again, divided=plan.pp_schedule == "zb_h1")


def _backward_of(spans: tuple[Span, ...]) -> list[float]:
    stages: dict[int, list[float]] = {}
    for span in spans:
        if not span.is_forward and not span.is_weights:
            stages.setdefault(span.stage, []).append(span.end - span.start)
    return max(stages.values(), key=sum)


def _bars(axes: Any, stage: int, spans: list[Span], color: str) -> None:
    bars = [(span.start, span.end - span.start) for span in spans]
    axes.broken_barh(bars, (stage - 0.42, 0.84), facecolors=color, edgecolors="white", linewidth=0.4)


def _legend(axes: Any, again: float, *, divided: bool) -> None:
    from matplotlib.patches import Patch

    kinds = [("forward", _FORWARD), ("backward", _BACKWARD), ("idle or waiting for a message", _IDLE)]
    if divided:
        kinds.insert(2, ("gradients of weights", _WEIGHTS))
    if again > 0.005:
        kinds.insert(2, ("recomputed", _AGAIN))
    patches = [Patch(color=color, label=name) for name, color in kinds]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def _draw_memory(axes: Any, prediction: Prediction) -> None:
    stages = range(len(prediction.memory))
    bottom = [0.0] * len(stages)
    for part, color in zip(CARD_PARTS, _PALETTE, strict=True):
        heights = [getattr(memory, part) / GIB for memory in prediction.memory]
        if max(heights) > 0.005:
            axes.bar(stages, heights, bottom=bottom, color=color, label=part, width=0.8)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    room, card = prediction.cluster.card.memory_gib, prediction.cluster.card.name
    axes.axhline(room, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"{card}: {room:g} GiB", (0, room), xytext=(0, 3), textcoords="offset points", fontsize=9)
    axes.set(xlabel="pipeline stage", ylabel="GiB a device", ylim=(0, max(room, *bottom) * 1.08))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(-0.6, max(len(stages) - 0.4, 2))
    axes.figure.legend(loc="outside right upper", frameon=False)


def _draw_step(axes: Any, prediction: Prediction) -> None:
    parts = [(name, s) for name, s in prediction.time.parts.items() if s > 0 and name != "recompute"]
    names = [name.replace("_", " ") for name, _ in parts][::-1]
    seconds = [value for _, value in parts][::-1]
    bars = axes.barh(names, seconds, color=_FORWARD)
    axes.bar_label(bars, [f"{value:.3f} s ({value / sum(seconds):.0%})" for value in seconds], padding=4)
    low, middle, high = prediction.time.interval
    axes.set(xlabel="seconds", xlim=(0, max(seconds) * 1.25))
    again = prediction.time.parts["recompute"]
    recomputed = f"; {again:.3f} s of it are recomputation" if again else ""
    axes.set_title(f"step {middle:.3f} s, likely {low:.3f} to {high:.3f} s{recomputed}")


def _section(words: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    alt = html.escape(words)
    return f'<h2>{alt}</h2>\n<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'


def _page(prediction: Prediction, sections: list[str]) -> str:
    title = html.escape(plan_text(prediction.job))
    text = html.escape(f"{account(prediction)}\n\n{constants(prediction.cluster)}")
    pictures = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Plan {title}</title>
<style>body{{font:16px/1.5 sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}}
img{{max-width:100%}}pre{{overflow-x:auto;background:#f5f5f5;padding:1rem;font-size:13px}}</style></head>
<body><h1>{prediction.job.plan.world_size} x
{html.escape(prediction.cluster.card.name)}</h1><p><code>{title}</code></p> {pictures} <h2>The whole
account</h2><pre>{text}</pre></body></html>
"""
