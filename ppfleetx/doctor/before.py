"""What would keep the launcher from starting ranks, examined before it runs: it would end silently."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

from ppfleetx.config.counts import counted
from ppfleetx.doctor.interfaces import is_local
from ppfleetx.doctor.nodes import own_address
from ppfleetx.doctor.rows import Row, fail

# The launcher takes these for its options, and ranks take them for their place in the job.
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
    """Rows of what is wrong; none if nothing is.

    Args:
        environ: what the launcher will get.
        nodes: machines of the job.
        nproc: processes of this machine; None: one per card.
    """
    left = [name for name in _OF_ANOTHER_JOB if environ.get(name)]
    if left and nodes == 1:  # with several, a scheduler may have set them for this job
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
        origin = f"POD_IP={environ['POD_IP']}" if environ.get("POD_IP") else "the host name stands for it"
        yield fail(
            "own address",
            f"{own} is not this machine's ({origin}): its processes do not meet",
            "unset POD_IP, or POD_IP=127.0.0.1 before the command",
        )


def import_row() -> Row | None:
    """Why Paddle cannot be imported; None if it can. Tried in another process, which the import may end."""
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
        f"{how}: {lines[-1] if lines else 'without a message'}",
        "a library that Paddle needs is missing or of another version, or a limit of this shell "
        "(ulimit -a) is too small for it",
    )
