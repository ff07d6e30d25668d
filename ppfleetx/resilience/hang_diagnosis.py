"""Find out from the hang reports of all ranks why a job hangs, and name the ranks at fault in one sentence.

A rank *waits* if its main thread is in a collective, a send or a receive. A rank is at fault if others wait
for it, but it does not wait itself. A rank without a report counts as not waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ppfleetx.config.message_text import ranks_text
from ppfleetx.resilience.hang_report import CallNote, Report

_EQUAL_SHAPES = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "barrier"}
_SHOWN_WAITS = 3
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Explanation:
    """Why a job hangs, as found from the reports of its ranks. The attributes are the keys that
    ``ppfleetx hang-report --json`` prints.

    Attributes:
        sentence: the explanation for the user.
        missing: the ranks for which others wait, but which do not wait themselves. Empty if none is found,
            or if an error ended the job. If no rank waits at all, these are the ranks that make no progress
            or, if there are none, all ranks with a report.
        silent: the ranks that have written no report.
        goes_on: the ranks that still make progress. If there are any, the job does not hang. Empty if an
            error ended the job.
    """

    sentence: str
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    goes_on: tuple[int, ...]


def explain(reports: Mapping[int, Report]) -> Explanation:
    """Explain why a job hangs, or why an error ended it. ``reports`` has at least one rank's report."""
    size = max(report.world_size for report in reports.values())
    silent = tuple(rank for rank in range(size) if rank not in reports)
    goes_on = tuple(rank for rank, report in sorted(reports.items()) if report.goes_on)
    waits = {rank: report.waits_for for rank, report in sorted(reports.items()) if report.waits_for}
    edges = {rank: _absent(rank, call, reports) for rank, call in waits.items()}
    failure = _failure(waits, edges, reports)
    if failure:
        return Explanation(failure + _steps(reports), (), silent, ())
    awaited = {rank for absent in edges.values() for rank in absent}
    missing = tuple(sorted(awaited - set(waits)))
    if not waits:
        missing = tuple(sorted(set(reports) - set(goes_on))) or tuple(sorted(reports))
        text = f"no rank waits for another: {_places(missing, reports, name=len(reports) > 1)}"
        if silent:
            text += f"; {ranks_text(silent)} wrote no report: {_silent_reason(silent, reports)}"
        return Explanation(text + _steps(reports), missing, silent, goes_on)
    if missing:
        near = [rank for rank in waits if set(edges[rank]) & set(missing)]
        text = _waiting(near, waits)
        others = [rank for rank in waits if rank not in near]
        if others:
            text += f", and {ranks_text(others)} for {'it' if len(near) == 1 else 'them'}"
        text += f"; {_arrival(missing, reports, silent)}"
        return Explanation(text + _steps(reports), missing, silent, goes_on)
    text = _disagreement(waits, reports)
    if not text:
        answered = [rank for rank, absent in edges.items() if not absent]
        text = _network(answered, waits, reports) if answered else _crossed(waits, edges, reports)
    return Explanation(text + _steps(reports), (), silent, goes_on)


def explain_alone(report: Report) -> Explanation:
    """Explain a hang from this rank's report alone. Used if the ranks cannot read each other's reports."""
    where = f"waits in {_shown(report.waits_for)}" if report.waits_for is not None else f"is {_place(report)}"
    text = (
        f"rank {report.rank} {where}; what the other ranks do is not known, because no report can be written"
    )
    goes_on = (report.rank,) if report.goes_on else ()
    others = tuple(rank for rank in range(report.world_size) if rank != report.rank)
    return Explanation(text + _steps({report.rank: report}), (), others, goes_on)


def _failure(
    waits: Mapping[int, CallNote], edges: Mapping[int, Sequence[int]], reports: Mapping[int, Report]
) -> str:
    failed = {rank: report for rank, report in sorted(reports.items()) if report.failure}
    if not failed:
        return ""
    differs = _disagreement(waits, reports) or _crossed(waits, edges, reports)
    own = {rank: report for rank, report in failed.items() if not report.lost}
    if own and not differs:
        parts = [f"rank {rank} failed, {_place(report)}: {report.failure}" for rank, report in own.items()]
        differs = "; ".join(parts[:_SHOWN_WAITS])
        if len(parts) > _SHOWN_WAITS:
            differs += f"; and {len(parts) - _SHOWN_WAITS} more ranks failed"
        others = [rank for rank in waits if rank not in own]
        return f"{_waiting(others, waits)}; {differs}" if others else differs
    if differs:
        return differs
    parts = next(iter(failed.values())).failure
    return f"{_waiting(list(waits), waits)}; {parts}" if waits else parts


def _absent(rank: int, call: CallNote, reports: Mapping[int, Report]) -> list[int]:
    if call.peer >= 0:
        other = reports.get(call.peer)
        key = f"{call.others_key}{rank}"
        return [call.peer] if other is None or other.counts.get(key, 0) <= call.number else []
    return [
        other
        for other in call.ranks
        if other != rank
        and (
            other not in reports
            or reports[other].counts.get(call.others_key, 0) <= call.number
            # Polls repeat, so `other` may have answered this poll after the polling rank wrote its report.
            or (call.asks and reports[other].waits_for is None)
        )
    ]


def _waiting(ranks: Sequence[int], waits: Mapping[int, CallNote]) -> str:
    """Return a phrase that says in which calls ``ranks`` wait, such as ``ranks 0-2 wait in all_reduce #418 of
    the mp group [0..3]``. At most three calls are named."""
    by_call = _grouped(ranks, lambda rank: _shown(waits[rank]))
    parts = [f"{ranks_text(who)} {_verb_form(who, 'wait')} in {call}" for call, who in by_call.items()]
    more = f", and {len(parts) - _SHOWN_WAITS} more such groups of ranks" if len(parts) > _SHOWN_WAITS else ""
    return ", ".join(parts[:_SHOWN_WAITS]) + more


def _shown(call: CallNote) -> str:
    if call.shape is None:
        return str(call)
    return f"{call} (shape {list(call.shape)}, {call.dtype})"


def _arrival(missing: Sequence[int], reports: Mapping[int, Report], silent: Collection[int]) -> str:
    parts = []
    quiet = [rank for rank in missing if rank in silent]
    if quiet:
        parts.append(
            f"{ranks_text(quiet)} never arrived and wrote no report: {_silent_reason(quiet, reports)}"
        )
    present = [rank for rank in missing if rank not in silent]
    if present:
        parts.append(f"{ranks_text(present)} never arrived: {_places(present, reports)}")
    return "; ".join(parts)


def _places(ranks: Sequence[int], reports: Mapping[int, Report], *, name: bool = False) -> str:
    by_place = _grouped(ranks, lambda rank: _place(reports[rank]))
    if len(by_place) == 1 and not name:
        return f"{'it is' if len(ranks) == 1 else 'they are'} {next(iter(by_place))}"
    return ", ".join(
        f"{ranks_text(who)} {_verb_form(who, 'is', 'are')} {place}" for place, who in by_place.items()
    )


def _place(report: Report) -> str:
    what = report.place if report.importing is None else f"importing {report.importing}, {report.place}"
    where = f" ({report.where})" if report.where else ""
    if report.works:
        return f"{what}{where}, and works"
    if report.computes and report.place_seconds >= report.timeout:
        return f"{what}{where}, and has computed there for {report.place_seconds:.0f} s"
    return f"{what}{where}"


def _silent_reason(ranks: Sequence[int], reports: Mapping[int, Report]) -> str:
    """Return a phrase that says why ``ranks`` have written no report, such as "its process has ended". It
    gives the states of their processes, which other ranks on the same machine have reported."""

    def state_of(rank: int) -> str:
        states = [report.peers[rank] for report in reports.values() if rank in report.peers]
        return next((state for state in states if state), "" if states else "?")

    by_state = _grouped(ranks, state_of)
    killed = any(report.killed_for_memory for report in reports.values())
    parts = []
    for state, who in by_state.items():
        its = "its process" if len(who) == 1 else "their processes"
        if state == "?":
            text = f"{its} cannot be seen from here (stopped, ended, or cut off from the others)"
        elif not state:
            text = f"{its} runs, but not its Python threads (a call of C code that holds the interpreter)"
        else:
            text = (
                f"{its} {state if len(who) == 1 else state.replace('has', 'have', 1).replace('is ', 'are ')}"
            )
            if "ended" in state and killed:
                text += "; meanwhile the kernel has killed a process because memory ran out"
        parts.append(text if len(by_state) == 1 else f"{text} ({ranks_text(who)})")
    return "; ".join(parts)


def _disagreement(waits: Mapping[int, CallNote], reports: Mapping[int, Report]) -> str:
    for rank, call in waits.items():
        if call.peer >= 0:
            continue
        notes = {other: _call_of(reports.get(other), call) for other in call.ranks}
        called = [other for other, note in notes.items() if note is not None]
        theirs = _grouped(called, lambda other, notes=notes: _signature(notes[other]))
        if len(theirs) > 1:
            parts = ", ".join(
                f"{ranks_text(who)} {_verb_form(who, 'call')} {what}"
                for what, who in sorted(theirs.items(), key=_size)
            )
            return f"{_waiting([rank], waits)}, and the calls differ: as number {call.number} {parts}"
    return ""


def _size(entry: tuple[str, list[int]]) -> tuple[int, list[int]]:
    return -len(entry[1]), entry[1]


def _signature(call: CallNote) -> str:
    if call.operation not in _EQUAL_SHAPES or call.shape is None:
        return call.operation
    return f"{call.operation} with shape {list(call.shape)} of {call.dtype}"


def _call_of(report: Report | None, call: CallNote) -> CallNote | None:
    if report is None:
        return None
    calls = [one for one in report.calls if one.peer < 0 and one.group_id == call.group_id]
    return next((one for one in calls if one.number == call.number), None)


def _crossed(
    waits: Mapping[int, CallNote], edges: Mapping[int, Sequence[int]], reports: Mapping[int, Report]
) -> str:
    for rank, absent in edges.items():
        for other in absent:
            if other in edges and rank in _reached(other, edges):
                common = _last_common(reports[rank], reports[other])
                after = f"; the last that both called was {common}" if common else ""
                return (
                    f"{_waiting([rank, other], waits)}, so each waits for the other{after}; the ranks do not "
                    "run the same operations in the same order: one was left out, or two are swapped"
                )
    return ""


def _reached(start: int, edges: Mapping[int, Sequence[int]]) -> set[int]:
    found: set[int] = set()
    pending = [start]
    while pending:
        for rank in edges.get(pending.pop(), ()):
            if rank not in found:
                found.add(rank)
                pending.append(rank)
    return found


def _last_common(one: Report, other: Report) -> str:
    theirs = {(call.group_id, call.number) for call in other.calls if call.peer < 0}
    for call in reversed(one.calls):
        if call.peer < 0 and (call.group_id, call.number) in theirs:
            return str(call)
    return ""


def _network(answered: Sequence[int], waits: Mapping[int, CallNote], reports: Mapping[int, Report]) -> str:
    involved = set(answered)
    for call in (waits[rank] for rank in answered):
        involved |= {call.peer} if call.peer >= 0 else set(call.ranks)
    hosts = sorted({reports[rank].host for rank in involved if rank in reports})
    between = f" between {' and '.join(hosts)}" if len(hosts) > 1 else ""
    return (
        f"{_waiting(answered, waits)}, and all participants have called it: the messages do not get "
        f"through; the network{between} is down, or one of its ends drops packets"
    )


def _steps(reports: Mapping[int, Report]) -> str:
    stepping = [rank for rank, report in sorted(reports.items()) if report.step is not None]
    by_step = _grouped(stepping, lambda rank: reports[rank].step)
    if not by_step:
        return ""
    if len(by_step) == 1:
        return f" (step {next(iter(by_step))})"
    usual = max(by_step, key=lambda step: (len(by_step[step]), step))
    parts = [
        f"{ranks_text(who)} {_verb_form(who, 'is', 'are')} at step {s}"
        for s, who in by_step.items()
        if s != usual
    ]
    return f"; {', '.join(parts)}, the others at step {usual}"


def _grouped(ranks: Iterable[int], fact: Callable[[int], Fact]) -> dict[Fact, list[int]]:
    """Call ``fact`` for each rank, and return {result: ranks with this result}."""
    found: dict[Fact, list[int]] = {}
    for rank in ranks:
        found.setdefault(fact(rank), []).append(rank)
    return found


def _verb_form(ranks: Sequence[int], singular_stem: str, plural: str | None = None) -> str:
    if plural is not None:
        return singular_stem if len(ranks) == 1 else plural
    return f"{singular_stem}s" if len(ranks) == 1 else singular_stem
