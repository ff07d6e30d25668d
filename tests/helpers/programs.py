"""``python script.py ...`` and ``python -m module ...`` in processes that need not import Paddle first.

:class:`Popen` and :func:`run` stand for those of :mod:`subprocess`. Where the command is this Python with a
script or module, the process is forked by the nursery (``tests/helpers/ranks.py``), which has imported
everything, instead of being executed; any other command is started as usual. The process has its own
working directory, environment, standard streams, session, signals and exit code, is a child of the test's
process like any other, and forks the Python programs it starts in the same way (launcher: ranks).

For the program nothing is loaded yet: modules that need Paddle are hidden until it imports one of them, so
"before Paddle is imported" means what it means elsewhere. What a fork cannot show is what happens while
Python starts and Paddle loads (environment variables read there, hash seeds); every program is therefore
also executed by a test or two, with :mod:`subprocess` itself. ``PPFLEETX_TESTS_EXECUTE=1`` executes them
all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import io
import json
import logging
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppfleetx.utils.end_processes import adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
ADOPTION_SECONDS = 180.0
SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


SWITCH = "PPFLEETX_TESTS_EXECUTE"  # set to 1, nothing is forked
IN_NAMESPACE = ["ip", "netns", "exec"]
NAMESPACES = Path("/run/netns")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


def is_forkable(command: object) -> bool:
    """Whether a command is this Python with a script or a module, perhaps in a network namespace, and
    forking is not switched off."""
    if isinstance(command, str | bytes | os.PathLike) or os.environ.get(SWITCH) == "1":
        return False
    words = _words(command)
    if words[:3] == IN_NAMESPACE:
        words = words[4:]
    if words[:1] != [sys.executable]:
        return False
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    return bool(rest) and (rest[0] == "-m" or rest[0].endswith(".py"))


def run(
    command: Sequence[object], *, timeout: float, executed: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)``.

    Args:
        executed: start it as a user does, without the nursery.
    """
    if executed:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    pipe = subprocess.PIPE
    with Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def one_thread() -> dict[str, str]:
    """The environment, so that tests do not slow each other down; two threads give the same results."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def ok(
    command: Sequence[object], *, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """:func:`run` with one thread; asserts that it succeeds."""
    done = run(command, timeout=timeout, **{"env": one_thread(), **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def refused(command: Sequence[object], *, timeout: float = 120, **options: Any) -> str:
    """:func:`run` with one thread; asserts that it ends with a user's error, and returns what it said."""
    done = run(command, timeout=timeout, **{"env": one_thread(), **options})
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


class _Forked(subprocess.Popen):
    """Started by :meth:`fork` where the command is this Python's; otherwise as ever."""

    def _execute_child(self, *arguments: Any) -> None:
        bound = inspect.signature(super()._execute_child).bind(*arguments).arguments
        if not self.can_fork(bound):
            super()._execute_child(*arguments)
            return
        streams = [
            given if given != -1 else standard
            for standard, given in enumerate((bound["p2cread"], bound["c2pwrite"], bound["errwrite"]))
        ]
        self.pid = self.fork(bound, streams)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(bound[name] for name in pipes))

    def can_fork(self, bound: Mapping[str, Any]) -> bool:
        return not bound["shell"] and is_forkable(bound["args"])

    def fork(self, bound: Mapping[str, Any], streams: list[int]) -> int:
        raise NotImplementedError


class Popen(_Forked):
    """In the test's process: the nursery forks, and the process becomes a child of this one."""

    def can_fork(self, bound: Mapping[str, Any]) -> bool:
        return super().can_fork(bound) and bound["preexec_fn"] is None

    def fork(self, bound: Mapping[str, Any], streams: list[int]) -> int:
        from tests.helpers.ranks import shared_nursery

        nursery = shared_nursery()
        ours, theirs = socket.socketpair()
        environment = os.environ if bound["env"] is None else bound["env"]
        request = {
            "command": _words(bound["args"]),
            "cwd": os.fspath(bound["cwd"] or os.getcwd()),
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "new_session": bool(bound["start_new_session"]),
            "parent": os.getpid(),
        }
        adopt_orphans()
        with ours, theirs:
            nursery.send({"program": True}, [theirs.fileno(), *streams])
            ours.sendall(json.dumps(request).encode() + b"\n")
            ours.settimeout(ADOPTION_SECONDS)
            answer = ours.recv(64)
        assert answer.isdigit(), f"{request['command']} was not started"
        return int(answer)


# -- in the nursery -----------------------------------------------------------------------------


class _Hidden:
    """Modules that need Paddle, loaded but out of sight until one of them is imported."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self._visible: dict[str, types.ModuleType] = {}
        self._logging: dict[str, tuple[int, list[logging.Handler], bool]] = {}
        self._path: list[str] = []
        self._streams: set[int] = set()
        self._dropped: list[types.ModuleType] = []  # never freed: a copy may close what is no longer its own

    def load(self) -> None:
        """Import Paddle as the programs do, and all of ppfleetx."""
        names = [name for _, name, _ in pkgutil.walk_packages([str(ROOT / "ppfleetx")], "ppfleetx.")]
        sys.modules["paddle"] = None  # an import fails
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        del sys.modules["paddle"]
        without = set(sys.modules)
        from ppfleetx.utils.process_env import import_paddle, prepare_process

        prepare_process()
        import_paddle()
        for name in names:
            with contextlib.suppress(ImportError):  # an optional library
                importlib.import_module(name)
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in without and name.partition(".")[0] in ("paddle", "ppfleetx")
        }
        self._visible = {name: m for name, m in sys.modules.items() if name not in self.modules}
        self._path = [entry for entry in sys.path if entry not in ("", str(ROOT))]
        self._logging = {name: _logger_state(name) for name in ("root", *logging.root.manager.loggerDict)}
        self._streams = _open_files()

    def become_fresh(self, kept: Sequence[int] = ()) -> None:
        """Make this process look like one in which nothing has been run or imported."""
        gc.disable()
        gc.freeze()
        self._dropped += list(sys.modules.values())
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)
        sys.modules.clear()
        sys.modules.update(self._visible)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        sys.meta_path.insert(0, _Finder(self))
        sys.path[:] = self._path
        for name in ("root", *logging.root.manager.loggerDict):
            _set_logger_state(name, self._logging.get(name, (logging.NOTSET, [], True)))
        for descriptor in _open_files() - self._streams - {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        sys.excepthook = sys.__excepthook__
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) or number == signal.SIGCHLD:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()

    def show(self) -> None:
        """Make the modules visible again."""
        sys.modules.update(self.modules)
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if parent and not hasattr(sys.modules[parent], child):
                setattr(sys.modules[parent], child, module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder:
    """Finds hidden modules; importing one shows them all."""

    def __init__(self, hidden: _Hidden) -> None:
        self._hidden = hidden

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in self._hidden.modules:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = self._hidden.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
        self._hidden.show()


hidden = _Hidden()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def serve(connection: socket.socket, streams: list[int]) -> None:
    """In a process the nursery has forked: start the program that ``connection`` asks for, and end.

    The program is a grandchild of the nursery; with its parent gone, the test's process adopts it.
    """
    if os.fork():
        os._exit(0)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.readline())
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent()
    if request["new_session"]:
        os.setsid()
    connection.sendall(str(os.getpid()).encode())
    become(request["command"], request["cwd"], request["environment"], streams)


class _Child(_Forked):
    """In a program: starts another by forking itself."""

    def fork(self, bound: Mapping[str, Any], streams: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            if bound["start_new_session"]:
                os.setsid()
            if bound["preexec_fn"] is not None:
                bound["preexec_fn"]()
        except BaseException:  # noqa: BLE001  (nothing may return into the copy of the parent)
            traceback.print_exc()
            os._exit(255)
        environment = os.environ if bound["env"] is None else bound["env"]
        become(_words(bound["args"]), os.fspath(bound["cwd"] or os.getcwd()), dict(environment), streams)
        raise AssertionError("not reached")


def become(command: list[str], cwd: str, environment: Mapping[str, str], streams: list[int]) -> None:
    """Become the program; does not return."""
    code = 1
    try:
        os.chdir(cwd)
        if command[:3] == IN_NAMESPACE:
            _enter_namespace(command[3])
            command = command[4:]
        copies = [os.dup(descriptor) for descriptor in streams]
        for standard, descriptor in enumerate(copies):
            os.dup2(descriptor, standard)
        hidden.become_fresh()
        os.environ.clear()
        os.environ.update(environment)
        _open_standard_streams(unbuffered="-u" in command[:2] or bool(environment.get("PYTHONUNBUFFERED")))
        sys.modules["numpy"].random.seed()
        subprocess.Popen = _Child
        code = _run(command)
    except BaseException:  # noqa: BLE001  (nothing may return into the copy of the parent)
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter_namespace(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open() as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _run(command: list[str]) -> int:
    """The exit code, after everything that Python does at exit."""
    words = command[2:] if command[1] == "-u" else command[1:]
    sys.orig_argv = list(command)
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    code = _exit_code(lambda: _run_module(words[1:]) if words[0] == "-m" else _run_script(words))
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


def _run_script(words: list[str]) -> None:
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _run_module(words: list[str]) -> None:
    sys.path.insert(0, os.getcwd())
    sys.argv = list(words)
    if words[0] == "paddle.distributed.launch":
        _apply_launcher_hook()
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _apply_launcher_hook() -> None:
    """What ``python -m ppfleetx.utils.cpu_launcher`` makes Python's start do, where that has been run."""
    import sysconfig

    from ppfleetx.utils import cpu_launcher

    if (Path(sysconfig.get_path("purelib")) / cpu_launcher.HOOK).exists():
        cpu_launcher.apply()


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _print_uncaught()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException:  # noqa: BLE001  (as Python does with what nobody caught)
        _print_uncaught()
        return 1
    return 0


def _print_uncaught() -> None:
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)


def _open_standard_streams(*, unbuffered: bool) -> None:
    raw = [io.FileIO(descriptor, mode, closefd=False) for descriptor, mode in enumerate("rww")]
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw[0]), encoding="utf-8")
    for name, file, errors in (("stdout", raw[1], "strict"), ("stderr", raw[2], "backslashreplace")):
        stream = io.TextIOWrapper(
            io.BufferedWriter(file),
            encoding="utf-8",
            errors=errors,
            line_buffering=name == "stderr",
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _words(command: Any) -> list[str]:
    return [os.fsdecode(word) for word in command]


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _logger_state(name: str) -> tuple[int, list[logging.Handler], bool]:
    logger = logging.getLogger(None if name == "root" else name)
    return logger.level, list(logger.handlers), logger.propagate


def _set_logger_state(name: str, state: tuple[int, list[logging.Handler], bool]) -> None:
    logger = logging.getLogger(None if name == "root" else name)
    logger.setLevel(state[0])
    logger.handlers[:] = state[1]
    logger.propagate = state[2]
