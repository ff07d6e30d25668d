"""Make ``python -m paddle.distributed.launch`` (Paddle 3.3.1) usable on machines without a GPU.

    python -m ppfleetx.utils.cpu_launcher

writes a file ``ppfleetx_cpu_launcher.pth`` to the site-packages of this Python environment. To undo this,
delete the file. The file affects only processes started as ``python -m paddle.distributed.launch``:

- ``--devices 0,1`` works without a GPU.
- Waiting for other nodes (``--master``) has a time limit.
- The exit code says why the job ended.
- After Ctrl-C, the last lines of the first rank's log are printed.

Paddle's own code is not modified.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.device_support import expected_device
from ppfleetx.utils.end_processes import LAUNCHER, LAUNCHER_VARIABLE, stop_signals
from ppfleetx.utils.exit_codes import EXIT_DEVICE, EXIT_HUNG, EXIT_NO_MEMORY, EXIT_PEER_LOST, EXIT_USER_ERROR
from ppfleetx.utils.lost_peers import START_VARIABLE, start_timeout

HOOK = "ppfleetx_cpu_launcher.pth"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Only a .pth file makes code run before Paddle's launcher when users start it by its usual command. In such
# a file, Python runs only lines that begin with `import`. The line must not fail without ppfleetx.
_LINE = (
    f"import sys; '{LAUNCHER}' in sys.orig_argv and __import__('importlib.util', fromlist=['util'])"
    ".find_spec('ppfleetx') and __import__('ppfleetx.utils.cpu_launcher', fromlist=['x']).apply()\n"
)

_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_FOLLOW_SECONDS = 0.5
_SAY_AFTER_SECONDS = 10.0  # seconds until the wait is reported
_CAUSES = (EXIT_HUNG, EXIT_NO_MEMORY, EXIT_DEVICE)  # other ranks can then end with other codes
_SIGNALED = 128  # a shell reports 128 + n for a program ended by signal n

_prepared: set[int] = set()


def apply() -> None:
    """Make Paddle's launcher usable without a GPU (:func:`prepare`) if this process runs it."""
    options = launcher_options(sys.orig_argv)
    if options is not None:
        prepare(options)


def prepare(options: Sequence[str]) -> None:
    """Adapt Paddle's launcher, which runs in this process with the arguments ``options``. A second call has
    no effect.

    On a machine without a card, ``CUDA_VISIBLE_DEVICES`` is set so that the launcher starts as many processes
    as requested. On all machines, waiting for other nodes has a time limit, and the exit code says why the
    job ended.
    """
    # Python runs the .pth file twice if it finds it under both lib and lib64.
    if os.getpid() in _prepared:
        return
    _prepared.add(os.getpid())
    if expected_device("auto") == "cpu":
        name_devices(options, os.environ)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    watch_launcher(options)


def launcher_options(argv: Sequence[str]) -> list[str] | None:
    """Return the arguments of Paddle's launcher if the command line ``argv`` starts it, or else None."""
    words = iter(range(1, len(argv)))
    for place in words:
        if argv[place] == "-m":
            return list(argv[place + 2 :]) if argv[place + 1 : place + 2] == [LAUNCHER] else None
        if argv[place] in ("-W", "-X"):
            next(words, None)
        elif not argv[place].startswith("-"):
            return None
    return None


def name_devices(options: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Change ``CUDA_VISIBLE_DEVICES`` in ``environ``, if necessary, so that Paddle's launcher starts as many
    processes as ``--devices`` or ``--nproc_per_node`` in ``options`` ask for."""
    # Paddle starts one process for each number in CUDA_VISIBLE_DEVICES. Without the variable, it looks up the
    # numbers of --devices among the GPUs, and fails if there is none.
    visible = environ.get(_VISIBLE, "").split(",")
    devices = option_of(options, "--devices") or option_of(options, "--gpus")
    number = option_of(options, "--nproc_per_node") or ""
    if devices is not None:
        devices = devices.replace(" ", "")
        if not set(devices.split(",")) <= set(visible):
            environ[_VISIBLE] = devices
    elif number.isdecimal() and int(number) > len(visible):
        environ.pop(_VISIBLE, None)


def install(site_packages: Path | None = None) -> Path:
    """Write the ``.pth`` file that makes Python call :func:`apply` when it starts, and return its path.
    ``site_packages`` is the directory for the file; None: the site-packages of this environment."""
    path = (site_packages or Path(sysconfig.get_path("purelib"))) / HOOK
    path.write_text(_LINE, encoding="utf-8")
    return path


# -- limits, exit codes and last lines -------------------------------------------------------


def watch_launcher(argv: Sequence[str]) -> None:
    master = os.environ.get("PADDLE_MASTER") or option_of(argv, "--master")
    if master is not None and not _is_address(master):
        rule = "not HOST:PORT, an address of the first node and a free port of it (1 to 65535)"
        _end(EXIT_USER_ERROR, f"--master {master}: {rule}")
    nodes = os.environ.get("PADDLE_NNODES") or option_of(argv, "--nnodes")
    if nodes is not None and not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        _end(EXIT_USER_ERROR, f"--nnodes {nodes}: not the number of machines, an integer of at least 1")
    try:
        limit = start_timeout()
    except ConfigError as error:
        _end(EXIT_USER_ERROR, str(error))
    if signal.SIGHUP in stop_signals():
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # the ranks save
    atexit.register(_end_with_conventional_code)
    threading.Thread(target=_watch, args=(limit,), name="launcher-watch", daemon=True).start()


def _is_address(master: str) -> bool:
    found = re.fullmatch(r"(etcd://)?[^:/]+:(\d{1,5})", master, re.ASCII)
    return found is not None and 0 < int(found[2]) < 65_536


def option_of(argv: Sequence[str], name: str) -> str | None:
    """Return the value of the option ``name`` in the launcher's arguments ``argv``, or None if it is
    absent."""
    for place, word in enumerate(argv):
        if word.endswith(".py"):  # what follows are the program's arguments
            break
        if word == name:
            return argv[place + 1] if place + 1 < len(argv) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _controller() -> Any:
    """Return the object of Paddle's launcher that controls the ranks, or None if it does not exist yet."""
    # The launcher has made a method of this object its handler of SIGTERM.
    controller = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return controller if hasattr(controller, "pod") and hasattr(controller, "master") else None


def _watch(limit: float) -> None:
    begin = time.monotonic()
    while (controller := _controller()) is None:
        if time.monotonic() - begin > limit:
            return  # another kind of launcher
        time.sleep(_LOOK_SECONDS)
    _watch_meeting(controller, limit)
    while True:
        is_open = _log.follow(controller)
        time.sleep(_FOLLOW_SECONDS if is_open else _LOOK_SECONDS)


# -- exit code --------------------------------------------------------------------------------


def _end_with_conventional_code() -> None:
    """End the launcher with an exit code that says why the job ended. Without a signal, it is the code of the
    rank that best explains the failure. After a signal, it is 0 if all ranks ended without an error, and
    otherwise 128 + the number of the signal. Registered with ``atexit``."""
    controller = _controller()
    if controller is None:
        return
    codes = [container.exit_code for container in controller.pod.containers]
    number = getattr(controller, "sigint", None)
    if number is not None:
        _log.follow(controller)
        # Paddle's launcher exits with the bare number of the signal: 2 after Ctrl-C, which would mean
        # EXIT_USER_ERROR.
        code = 0 if codes and not any(codes) and None not in codes else _SIGNALED + number
    else:
        failed = next((code for code in codes if code), 0)
        telling = _most_telling_code(codes)
        if telling == failed >= 0:
            return  # the launcher's own choice
        code = telling if telling >= 0 else _SIGNALED - telling
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _most_telling_code(codes: Sequence[int | None]) -> int:
    """Return the exit code of the rank that best explains why a job failed; 0 if none failed."""
    failed = [code for code in codes if code]
    causes = [code for code in failed if code in _CAUSES]
    own = [code for code in failed if code != -signal.SIGTERM]
    # The codes of ranks that the launcher itself ended come last.
    return (causes or own or failed or [0])[0]


# -- the first rank's log ---------------------------------------------------------------------


class _Log:
    """Prints the rest of the first rank's log after a signal, when Paddle's launcher no longer does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: Any = None
        self._rest: BinaryIO | None = None

    def follow(self, controller: Any) -> bool:
        """Open the first rank's log once the launcher has created it. After a signal, print the part of the
        log that the launcher has not shown. Must be called repeatedly. Returns whether the log has been
        opened."""
        first = next(iter(controller.pod.containers), None)
        opened = getattr(first, "_log_handler", None)
        start = getattr(first, "_log_start_offset", None)
        with self._lock, contextlib.suppress(OSError, ValueError):  # the file or terminal may be closed
            if opened is not None and opened is not self._opened:
                self._rest = os.fdopen(os.dup(opened.fileno()), "rb", buffering=0)  # shares the file position
                self._opened = opened
            elif opened is None and start is not None and hasattr(controller, "sigint"):
                if self._rest is None:  # opened and closed again since the last call; nothing was shown yet
                    self._rest = io.FileIO(first._out)
                    self._rest.seek(start)
                sys.stdout.flush()
                shutil.copyfileobj(self._rest, sys.stdout.buffer)
                sys.stdout.flush()
        return self._rest is not None


_log = _Log()


# -- the rendezvous of the nodes ---------------------------------------------------------------


def _watch_meeting(controller: Any, limit: float) -> None:
    """Wait until the rendezvous of the job's nodes is complete. End the launcher with a message if this takes
    more than ``limit`` seconds, or if the rendezvous port cannot be used."""
    if _is_meeting(controller):
        _Meeting(controller).examine_port()
    begin = time.monotonic()
    for moment in sorted({min(limit, _SAY_AFTER_SECONDS), limit}):
        while time.monotonic() - begin < moment:
            if not _is_meeting(controller):
                return
            time.sleep(_LOOK_SECONDS)
        state = _Meeting(controller).state()
        if not _is_meeting(controller):
            return
        if moment == limit:
            _end(EXIT_PEER_LOST, f"after {moment:g} s {state}. {START_VARIABLE} sets the limit of the wait")
        print(f"this launcher waits for {limit:g} s at most: {state}", file=sys.stderr, flush=True)


def _is_meeting(controller: Any) -> bool:
    of_http = type(controller.master).__name__ == "HTTPMaster"
    return of_http and controller.job.replicas > 1 and controller.ctx.status.current() is None


class _Meeting:
    def __init__(self, controller: Any) -> None:
        self._controller, self._nodes = controller, controller.job.replicas
        address = controller.master.endpoint or controller.ctx.args.master or ""
        self._host, _, port = address.rpartition(":")
        self._port, self._where = int(port or 0), address

    def examine_port(self) -> None:
        """End the launcher with a message if the rendezvous port on this machine cannot be opened or belongs
        to another program or job."""
        if self._port and self._host in ("127.0.0.1", self._controller.ctx.node.ip):
            problem = self._problem_of_port()
            if problem and self._controller.master.server is None and _is_meeting(self._controller):
                _end(
                    EXIT_USER_ERROR,
                    f"--master {self._where}: {problem}. Give all nodes another free port of this machine",
                )

    def _problem_of_port(self) -> str:
        try:
            socket.create_connection((self._host, self._port), _ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return self._problem_of_listening()
        except OSError as error:
            return str(error)
        try:
            names = {entry.get("name", "") for entry in self._entries()}
        except (OSError, ValueError, http.client.HTTPException):
            return "another program holds the port"
        is_full = self._controller.pod.name not in names and len(names) >= self._nodes
        return "another job with the same --job_id runs there" if is_full else ""

    def _problem_of_listening(self) -> str:
        try:
            socket.create_server(("", self._port)).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program holds the port"
            return f"the port cannot be opened ({error.strerror})"
        return ""

    def state(self) -> str:
        """Return a sentence that says what the launcher is waiting for, with advice for the user."""
        nobody = f"no launcher answers at {self._where}, where the {self._nodes} nodes of this job meet"
        try:
            entries = self._entries()
        except OSError as error:
            return (
                f"{nobody} ({error}). Is the first node's launcher started, is the address right, does a "
                f"firewall block it? On the first node give --host {self._host} if the launcher uses another "
                f"address (here {self._controller.ctx.node.ip})"
            )
        except (ValueError, http.client.HTTPException):
            return f"{nobody}: another program holds the port. Give all nodes another free port"
        came = sorted(entry.get("candidate", "?").partition(":")[0] for entry in entries)
        return (
            f"{len(came)} of {self._nodes} nodes have come to {self._where} ({', '.join(came)}). All need "
            "the same --master, --nnodes and --job_id, which no other job may use"
        )

    def _entries(self) -> list[dict[str, Any]]:
        """Return the entries with which the job's nodes have registered at the first node's launcher.

        Raises:
            OSError: nothing answers at the address of that launcher.
            ValueError, http.client.HTTPException: the program that answers is not a launcher.
        """
        if self._ask("/healthy") != {"/healthy": "ok"}:
            raise ValueError("it is not a launcher")
        return [json.loads(entry) for entry in self._ask(f"/{self._controller.job.id}/info").values()]

    def _ask(self, path: str) -> dict[str, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.NOT_FOUND:
                return {}
            return json.loads(response.read())


def _end(code: int, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    print(f"wrote {install()}: Paddle's launcher accepts --devices without a GPU, and its waits end")
