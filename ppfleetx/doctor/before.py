"""What would keep the launcher from starting ranks, looked at before it runs: it would end without a word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping

from ppfleetx.config.counts import counted
from ppfleetx.doctor.interfaces import is_local
from ppfleetx.doctor.links import reach
from ppfleetx.doctor.nodes import own_address, resolved
from ppfleetx.doctor.rows import Row, fail, warn

# The launcher reads these as if they were its options, and ranks take them for their place in the job.
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
_REACH_SECONDS = 5.0
_IMPORT_SECONDS = 120.0


def launcher_rows(
    environ: Mapping[str, str], nodes: int, nproc: int | None, master: str | None = None
) -> Iterator[Row]:
    """Rows of what is wrong; none where nothing is.

    Args:
        environ: of this process, which the launcher gets.
        nodes: machines of the job.
        nproc: processes that were asked for; None: as many as there are cards.
        master: ``HOST:PORT``, where it was given.
    """
    try:
        os.getcwd()  # noqa: PTH109
    except OSError as error:
        yield fail("working directory", f"it is gone: {error.strerror}", "cd to a directory that is there")
    left = [name for name in _OF_ANOTHER_JOB if environ.get(name)]
    if left and nodes == 1:  # with several, a scheduler may have set them for this job
        told = " ".join(f"{name}={environ[name]}" for name in left)
        yield fail(
            "launcher variables",
            f"{told}: the environment is that of another job, and the launcher would take it for its own",
            f"unset {' '.join(left)}",
        )
    visible = [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if nproc is not None and visible and len(visible) < nproc:
        yield fail(
            "CUDA_VISIBLE_DEVICES",
            f"{','.join(visible)}: {counted(len(visible), 'card')} for {nproc} processes",
            f"name {nproc} cards, unset the variable, or give --nproc {len(visible)}",
        )
    if nodes == 1 and master is not None:
        yield from _master(master, is_left=environ.get("PADDLE_MASTER") == master)
    if nodes == 1:
        yield from _own_address(environ)


def _master(master: str, *, is_left: bool) -> Iterator[Row]:
    """Whether the place that is named on one machine could be used, though its processes do without.

    Args:
        is_left: the environment names it, and nobody has typed it: a warning then.
    """
    told = warn if is_left else fail
    host, _, port = master.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 1 << 16 or not is_local(resolved(host)):
        cure = "leave --master (PADDLE_MASTER) out on one machine, or name this one and a free port of it"
        yield told("--master", f"{master} is no port of this machine", cure)
        return
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        cure = (
            "another program, or a job that still runs, holds it, or this user may not open it (below 1024): "
            "name a free port, or leave --master (PADDLE_MASTER) out"
        )
        yield told(
            "--master", f"port {port} of this machine cannot be opened: {os.strerror(error.errno)}", cure
        )


def _own_address(environ: Mapping[str, str]) -> Iterator[Row]:
    """Whether the processes of this machine reach each other at the address they are given."""
    own, named = own_address(environ), environ.get("POD_IP")
    whence = f"POD_IP={named}" if named else "the host name stands for it in /etc/hosts or the name service"
    if not is_local(own):
        cure = "unset POD_IP" if named else "POD_IP=127.0.0.1 before the command, or mend /etc/hosts"
        yield fail("own address", f"{own} is not this machine's ({whence}): its processes do not meet", cure)
        return
    try:
        with socket.create_server((own, 0)) as listener:
            problem = reach((own, listener.getsockname()[1]), _REACH_SECONDS)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        cure = "ip link set lo up; where that is up, a firewall drops what this machine sends to itself"
        yield fail("own address", f"this machine does not reach itself at {own}: {problem}", cure)


def import_row() -> Row | None:
    """Why Paddle cannot be imported, tried in another process, which that may end; None where it can."""
    command = [sys.executable, "-c", "import paddle"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False, errors="replace"
        )
    except OSError as error:
        return fail(
            "import paddle", f"{sys.executable} cannot be started: {error.strerror}", "let this user run it"
        )
    except subprocess.TimeoutExpired:
        return fail("import paddle", f"takes longer than {_IMPORT_SECONDS:g} s", "is its disk slow or gone?")
    if not done.returncode:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    how = f"ended by signal {-done.returncode}" if done.returncode < 0 else "fails"
    return fail(
        "import paddle",
        f"{how}: {lines[-1] if lines else 'without a word'}",
        "a library that Paddle needs is missing or of another version, or a limit of this shell "
        "(ulimit -a) is too small for it",
    )
