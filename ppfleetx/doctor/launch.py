"""Ranks for the examination: the nodes are looked at first, then the launcher runs in a process of its own.

So the table is all that this process prints, whatever launcher and ranks say, and it ends with a report even
where they end without one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ppfleetx.doctor.nodes import examine_nodes
from ppfleetx.doctor.rows import Row, fail
from ppfleetx.doctor.run import ALONE, LOCAL_SECONDS
from ppfleetx.utils.start import START_VARIABLE

DIRECTORY_VARIABLE = "PPFLEETX_DOCTOR_DIR"
"""Where the ranks of a machine leave their reports for the process that has started them."""
_REPORT, _LOG = "report.*.json", "launcher.log"
_END_SECONDS, _LOOK_SECONDS = 10.0, 0.5
_ALONE_SECONDS = 90.0
_STOP_SECONDS = 60.0  # the launcher waits 30 s for its ranks, and then kills them
_LAST_LINES = 12


def examine_nodes_first(nodes: int | None, master: str | None, seconds: float) -> list[Row]:
    """The rows of the nodes, of which there are none where a job has one machine."""
    if nodes is None or nodes < 2:
        return []
    if master is None:
        return [
            fail("--master", "several machines, and nothing says where they meet", "give --master HOST:PORT")
        ]
    return list(examine_nodes(master, nodes, seconds, os.environ))


def launched_rows(
    command: Sequence[str], *, seconds: float, logs_there: Path | None
) -> tuple[list[Row], int]:
    """Run the command that starts the ranks of this machine; their rows, and the size of the job.

    Args:
        command: ends when all ranks have.
        seconds: for which processes wait for each other.
        logs_there: where the ranks' logs are kept; None: nowhere, when all went well.
    """
    place = Path(tempfile.mkdtemp(prefix="ppfleetx-doctor-"))
    try:
        logs = [] if logs_there else ["--log-dir", str(place / "log")]
        environ = {**os.environ, DIRECTORY_VARIABLE: str(place)}
        environ.setdefault(START_VARIABLE, f"{seconds:g}")
        with (place / _LOG).open("wb") as log:
            code = _run([*command, *logs], environ, log.fileno(), LOCAL_SECONDS + 4 * seconds, place)
        return _read(place, logs_there or place / "log", code)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _read(place: Path, logs: Path, code: int) -> tuple[list[Row], int]:
    """The report of the first rank that has left one, or the last words of ranks that have not."""
    reports = sorted(place.glob(_REPORT))
    if reports:
        content = json.loads(reports[0].read_text("utf-8"))
        return [Row.from_json(row) for row in content["rows"]], content["world_size"]
    said = [_end_of(file) for file in (place / _LOG, *sorted(logs.glob("workerlog.*")))]
    told = "; ".join(filter(None, said))
    cure = "the end of their logs is above; --log-dir DIR keeps them whole"
    return [fail("launcher", f"the ranks ended without a report (exit code {code}): {told}", cure)], 1


def _run(command: Sequence[str], environ: dict[str, str], log: int, seconds: float, place: Path) -> int:
    """The exit code; nothing is left running. Where a rank has reported, the others end soon: one that does
    not is stopped, or hangs. Ranks that did not meet look for themselves, the first one at more things."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
    deadline, has_reported = time.monotonic() + seconds, False
    try:
        while (code := process.poll()) is None and time.monotonic() < deadline:
            if not has_reported and (reports := sorted(place.glob(_REPORT))):
                more = _END_SECONDS if _has_met(reports[0]) else _ALONE_SECONDS
                has_reported, deadline = True, time.monotonic() + more
            time.sleep(_LOOK_SECONDS)
        return signal.SIGTERM if code is None else code
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _has_met(report: Path) -> bool:
    rows = json.loads(report.read_text("utf-8"))["rows"]
    return all(row["name"] != ALONE for row in rows)


def _end_of(file: Path) -> str:
    lines = file.read_text("utf-8", "replace").splitlines()
    told = [line.strip() for line in lines if line.strip() and "LAUNCH INFO" not in line]
    return f"{file.name}: " + " | ".join(told[-_LAST_LINES:]) if told else ""


def leave_report(rows: Sequence[Row], world_size: int, directory: str, local_rank: int) -> None:
    """Write the rows for the process that has started this one."""
    content = {"world_size": world_size, "rows": [row.as_json() for row in rows]}
    name = _REPORT.replace("*", f"{local_rank:06}")
    part = Path(directory) / f"{name}.part"
    part.write_text(json.dumps(content), "utf-8")
    part.replace(Path(directory) / name)


def command_of(script: Path, arguments: Sequence[str]) -> list[str]:
    """The command that does what was asked for in another process."""
    return [sys.executable, str(script), "doctor", *arguments]
