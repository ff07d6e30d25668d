"""A forked program behaves like an executed one."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import programs

TELL = """
import json, logging, os, subprocess, sys
before = "paddle" in sys.modules
import paddle
json.dump({
    "argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "given": os.environ.get("GIVEN"),
    "path": os.environ.get("PATH"), "stdin": sys.stdin.read(), "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(), "before": before, "after": "paddle" in sys.modules,
    "files": sorted(os.listdir("/proc/self/fd"))[:3], "handlers": len(logging.getLogger("ppfleetx").handlers),
}, sys.stdout)
print("to the other stream", file=sys.stderr)
"""


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return written


@pytest.mark.parametrize("executed", [False, True], ids=["forked", "executed"])
def test_what_a_program_is_given(write, tmp_path, executed):
    popen = subprocess.Popen if executed else programs.Popen
    pipe = subprocess.PIPE
    with popen(
        [sys.executable, write(TELL), "one", "-o", "two"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=tmp_path,
        env={"GIVEN": "yes", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        output, errors = process.communicate("asked", timeout=60)
    assert process.returncode == 0, errors
    told = json.loads(output)
    assert told == {
        "argv": [str(tmp_path / "program.py"), "one", "-o", "two"],
        "name": "__main__",
        "cwd": str(tmp_path),
        "given": "yes",
        "path": None,
        "stdin": "asked",
        "leads": True,
        "parent": os.getpid(),
        "before": False,
        "after": True,
        "files": ["0", "1", "2"],
        "handlers": 0,
    }
    assert errors.endswith("to the other stream\n")


@pytest.mark.parametrize("executed", [False, True], ids=["forked", "executed"])
@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise ValueError('not caught')", 1, "ValueError: not caught\n"),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'the end')", 0, "the end"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_how_a_program_ends(write, text, code, words, executed):
    done = programs.run([sys.executable, write(text)], timeout=60, executed=executed)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(words) if words else done.stderr == ""
