"""How a tool writes, and how it ends when nobody reads its output any more."""

import os
import signal
import subprocess
import sys

import pytest

from tests.utils.python import ROOT

PROGRAM = """
import os, sys
from ppfleetx.utils.exit_codes import run_tool
from ppfleetx.utils.log import configure_logging

def main():
    log = configure_logging()
    how = sys.argv[1]
    print("first line", flush=True)
    sys.stdin.read()  # until the reader has gone
    if how == "log":
        log.info("second line")
    elif how == "print":
        print("second line", flush=True)
    elif how == "buffer":
        print("second line")
    elif how == "other":
        read, write = os.pipe()
        os.close(read)
        os.write(write, b"x")

run_tool(main)
"""


def run(how: str, *, close: bool) -> tuple[int, str]:
    """Exit code and stderr of the program above, whose output is closed after one line."""
    with started(PROGRAM, how) as process:
        assert process.stdout.readline() == "first line\n"
        if close:
            process.stdout.close()
        process.stdin.close()
        errors = process.stderr.read()
    return process.returncode, errors


@pytest.mark.parametrize("how", ["log", "print", "buffer"])
def test_a_tool_whose_reader_has_gone_ends_without_a_word(how: str) -> None:
    assert run(how, close=True) == (141, "")
    assert run(how, close=False) == (0, "")


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    program = "from ppfleetx.utils.exit_codes import run_tool\nrun_tool(lambda: print('caf\\xe9 \\u4e2d'))"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 \\u4e2d\n", b"")


def test_another_broken_pipe_is_a_defect_and_keeps_its_traceback() -> None:
    code, errors = run("other", close=False)
    assert code == 1
    assert "Traceback" in errors and "BrokenPipeError" in errors


@pytest.mark.parametrize("first", ["", "import_paddle()"])
def test_sigterm_ends_a_tool_with_a_sentence(first: str) -> None:
    program = (
        "import os, time\n"
        "from ppfleetx.utils.exit_codes import run_tool\n"
        "from ppfleetx.utils.process_env import import_paddle\n"
        "def main():\n"
        f"    {first}\n"
        "    here, there = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.write(there, b'.')\n"  # a signal during the fork is forgotten by Python
        "    else:\n"
        "        os.read(here, 1)\n"
        "        os.kill(child, 15)\n"
        "        os.waitpid(child, 0)\n"
        "        print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "run_tool(main)\n"
    )
    with started(program) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        errors = process.stderr.read()
    assert process.returncode == -signal.SIGTERM
    assert errors == "ended by SIGTERM; there was nothing to save\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("after", ["pass", "raise OSError('of C++, which has no other')"])
def test_what_a_tool_has_made_for_itself_goes_with_it(number: int, after: str) -> None:
    """Whatever becomes of the exception on its way, the process ends as the signal would have ended it."""
    program = (
        "import tempfile, time\n"
        "from ppfleetx.utils.exit_codes import run_tool\n"
        "def main():\n"
        "    with tempfile.TemporaryDirectory() as place:\n"
        "        print(place, flush=True)\n"
        "        try:\n"
        "            time.sleep(60)\n"
        f"        except BaseException:\n            {after}\n"
        "run_tool(main)\n"
    )
    with started(program) as process:
        place = process.stdout.readline().strip()
        assert os.path.isdir(place)
        process.send_signal(number)
        errors = process.stderr.read()
    assert process.returncode == -number
    assert errors == f"ended by {signal.Signals(number).name}; there was nothing to save\n"
    assert not os.path.exists(place)


def test_a_second_signal_does_not_wait_and_an_ignored_one_does_nothing() -> None:
    program = (
        "import signal, time\n"
        "from ppfleetx.utils.exit_codes import run_tool\n"
        "def main():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleans up', flush=True)\n"
        "        time.sleep(60)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup does
        "run_tool(main)\n"
    )
    with started(program) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.stdout.readline() == "cleans up\n"
        process.terminate()
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGTERM


def started(program: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", program, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
