"""Run ``ppfleetx doctor`` for a job of several processes. First, this process checks the environment
variables and the network. Then it launches the ranks, and the ranks run all other checks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ppfleetx.config.message_text import counted
from ppfleetx.doctor.network import examine_nodes, is_local, own_address
from ppfleetx.doctor.registry import CHECKS, Need, examine
from ppfleetx.doctor.results import Row, Status, Target, exit_code, fail, in_groups
from ppfleetx.doctor.run import LOCAL_SECONDS
from ppfleetx.utils.lost_peers import START_VARIABLE

# The launcher reads its options from these variables, and the ranks read their rank and the job's size.
# Values that another job has set mislead them.
_OF_ANOTHER_JOB = (
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_TRAINERS_ENDPOINTS",
    "PADDLE_TRAINER_ID",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_NPROC_PER_NODE",
    "PADDLE_RANK",
    "PADDLE_IPS",
)
_IMPORT_SECONDS = 120.0


def launcher_rows(environ: Mapping[str, str], nodes: int, nproc: int | None) -> Iterator[Row]:
    """Yield a report row for each environment variable or address that would make Paddle's launcher fail."""
    left = [name for name in _OF_ANOTHER_JOB if environ.get(name)]
    if left and nodes == 1:  # with several nodes, a scheduler may have set them for this job
        found = " ".join(f"{name}={environ[name]}" for name in left)
        yield fail(
            "launcher variables",
            f"{found}: the environment is that of another job, and the launcher would take it for its own",
            f"unset {' '.join(left)}",
        )
    visible = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if nproc is not None and visible and len(visible) < nproc:
        yield fail(
            "CUDA_VISIBLE_DEVICES",
            f"{','.join(visible)}: {counted(len(visible), 'card')} for {nproc} processes",
            f"name {nproc} cards, unset the variable, or give --nproc {len(visible)}",
        )
    own = own_address(environ) if nodes == 1 else ""
    if own and not is_local(own):
        origin = f"POD_IP={environ['POD_IP']}" if environ.get("POD_IP") else "the host name resolves to it"
        yield fail(
            "own address",
            f"{own} is not this machine's ({origin}), so its processes cannot connect",
            "unset POD_IP, or POD_IP=127.0.0.1 before the command",
        )


def import_row() -> Row | None:
    """Return the report row that says why Paddle cannot be imported, or None if it can. The import is tried
    in a subprocess, because it can crash."""
    command = [sys.executable, "-c", "import paddle"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return fail("import paddle", f"takes longer than {_IMPORT_SECONDS:g} s", "is its disk slow or gone?")
    if not done.returncode:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"ended by signal {-done.returncode}" if done.returncode < 0 else "fails"
    return fail(
        "import paddle",
        f"{how}: {lines[-1] if lines else 'without a message'}",
        "a library that Paddle needs is missing or of another version, or a limit of this shell "
        "(ulimit -a) is too small for it",
    )


DIRECTORY_VARIABLE = "PPFLEETX_DOCTOR_DIR"
"""Name of the environment variable that holds a directory. Each rank writes its report there for the process
that launched the ranks."""
_REPORT, _LOG = "report.*.json", "launcher.log"
_END_SECONDS, _LOOK_SECONDS = 10.0, 0.5
_ALONE_SECONDS = 90.0
_STOP_SECONDS = 60.0  # the launcher waits 30 s for its ranks before it kills them
_LAST_LINES, _LONGEST_WORDS = 4, 600
_NOISE = ("LAUNCH INFO", "LAUNCH WARNING", "[    INFO]", "No ccache found", "warnings.warn(")
_FAILED_RANK = re.compile(r"^Container rank (\d+) status failed .* code (-?\d+) log ", re.MULTILINE)


def job_rows(
    command: Sequence[str],
    nproc: int | None,
    nodes: int | None,
    master: str | None,
    *,
    seconds: float,
    log_dir: Path | None,
) -> tuple[list[Row], int]:
    """Examine a job of several processes: check the environment variables and the network, then launch this
    machine's ranks. Returns the rows of the report, and the number of ranks in the job (1 if no rank has
    written a report).

    Args:
        command: the command that launches the ranks.
        nproc: number of ranks on this machine; None: one per card.
        nodes: number of machines; None: one. PADDLE_NNODES takes precedence.
        master: HOST:PORT where the machines meet. PADDLE_MASTER takes precedence.
        seconds: how long machines, and later ranks, wait for each other.
        log_dir: the directory of the ranks' logs; None: a temporary directory.
    """
    named = os.environ.get("PADDLE_NNODES", "")
    nodes = int(named) if named.isdigit() else nodes or 1
    master = os.environ.get("PADDLE_MASTER") or master
    rows = [replace(row, group="processes") for row in launcher_rows(os.environ, nodes, nproc)]
    if not rows:
        rows += [replace(row, group="nodes") for row in examine_nodes_first(nodes, master, seconds)]
    if exit_code(rows):
        return rows, 1
    found, size = launched_rows(command, seconds=seconds, log_dir=log_dir)
    return in_groups([*rows, *found]), size


def examine_nodes_first(nodes: int, master: str | None, seconds: float) -> list[Row]:
    """Check the network between the machines before ranks are launched. Returns the rows of the report, or an
    empty list for a job on one machine."""
    if nodes < 2:
        return []
    if master is None:
        found = f"{nodes} machines (--nnodes or PADDLE_NNODES), and nothing says where they meet"
        return [fail("--master", found, "give --master HOST:PORT, or unset PADDLE_NNODES")]
    return list(examine_nodes(master, nodes, seconds, os.environ))


def launched_rows(command: Sequence[str], *, seconds: float, log_dir: Path | None) -> tuple[list[Row], int]:
    """Run ``command``, which launches this machine's ranks. Returns the rows of the report, and the number of
    ranks in the job (1 if no rank has written a report)."""
    place = Path(tempfile.mkdtemp(prefix="ppfleetx-doctor-"))
    try:
        logs = [] if log_dir else ["--log-dir", str(place / "log")]
        environ = {**os.environ, DIRECTORY_VARIABLE: str(place)}
        environ.setdefault(
            START_VARIABLE, f"{seconds + _END_SECONDS:g}"
        )  # later than the ranks' own limit, so that the ranks report missing ranks first
        # Launcher and ranks print to this log. If they crash, the report shows the end of the log.
        with (place / _LOG).open("wb") as log:
            code = _run([*command, *logs], environ, log.fileno(), LOCAL_SECONDS + 4 * seconds, place)
        return _read(place, log_dir or place / "log", code)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _read(place: Path, logs: Path, code: int) -> tuple[list[Row], int]:
    reports = sorted(place.glob(_REPORT))
    if reports:
        content = json.loads(reports[0].read_text("utf-8"))
        return [Row.from_json(row) for row in content["rows"]], content["world_size"]
    return [replace(row, group=row.group or "processes") for row in _unreported(place / _LOG, logs, code)], 1


def _unreported(launcher_log: Path, logs: Path, code: int) -> Iterator[Row]:
    """Yield report rows that explain why no rank wrote its report: which ranks crashed, with the last lines
    of their logs, and what is wrong with this machine."""
    found = list(_FAILED_RANK.finditer(_text_of(launcher_log)))
    for rank, number in {(one[1], int(one[2])) for one in found}:
        how = f"exit code {number}" if number >= 0 else f"ended by signal {-number}"
        said = _end_of(logs / f"workerlog.{rank}")
        fix = "look at its machine and its memory (`dmesg -T | tail`: oom-kill)"
        yield fail(f"rank {rank}", f"it ended before it had reported ({how}) {said}".strip(), fix)
    if not found:
        said = filter(None, map(_end_of, (launcher_log, *sorted(logs.glob("workerlog.*")))))
        fix = "the ends of their logs are above; --log-dir DIR keeps them"
        text = f"the ranks ended without a report (exit code {code}): {'; '.join(said)}"
        yield fail("launcher", text, fix)
    if (row := import_row()) is not None:
        yield replace(row, group="environment")
    for check in CHECKS:
        if check.need is Need.NOTHING and not check.imports_paddle:
            yield from (row for row in examine(check, Target()) if row.status in (Status.WARN, Status.FAIL))


def _run(command: Sequence[str], environ: dict[str, str], log: int, seconds: float, place: Path) -> int:
    """Run the launcher ``command`` until the launcher and its ranks have ended, and return the launcher's
    exit code. Ranks that hang are stopped after at most ``seconds``. ``place`` is the directory of the ranks'
    reports."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
    deadline, is_near = time.monotonic() + seconds, False
    try:
        while (code := process.poll()) is None and (now := time.monotonic()) < deadline:
            if not is_near and (reports := sorted(place.glob(_REPORT))):
                # The machine's first rank runs the most checks. After its report, the other ranks get little
                # time.
                is_near = reports[0].name == _report_of(0)
                deadline = min(deadline, now + (_END_SECONDS if is_near else _ALONE_SECONDS))
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


def _text_of(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.exists() else ""


def _report_of(local_rank: int) -> str:
    return _REPORT.replace("*", f"{local_rank:06}")


def _end_of(file: Path) -> str:
    lines = [line.strip() for line in _text_of(file).splitlines() if line.strip()]
    lines = [line for line in lines if not any(noise in line for noise in _NOISE)]
    lines = [line for line in lines if line.startswith("error: ")][-1:] or lines
    return f"{file.name}: " + " | ".join(lines[-_LAST_LINES:])[-_LONGEST_WORDS:] if lines else ""


def leave_report(rows: Sequence[Row], world_size: int, directory: str, local_rank: int) -> None:
    content = {"world_size": world_size, "rows": [row.as_json() for row in rows]}
    name = _report_of(local_rank)
    part = Path(directory) / f"{name}.part"
    part.write_text(json.dumps(content), "utf-8")
    part.replace(Path(directory) / name)
