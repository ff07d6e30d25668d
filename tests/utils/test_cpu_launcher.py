import subprocess
import sys

import pytest

from ppfleetx.utils.cpu_launcher import install, launcher_options, name_devices
from ppfleetx.utils.end_processes import LAUNCHER


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        (None, ["--devices", "0,1", "train.py"], "0,1"),
        (None, ["--log_dir", "log", "--devices=0, 1,2", "train.py", "-c", "x.yaml"], "0,1,2"),
        (None, ["--gpus", "3", "train.py"], "3"),
        (None, ["--nproc_per_node", "2", "train.py"], None),
        (None, ["--nproc_per_node", "2", "train.py", "--devices", "0"], None),
        ("4,5", ["--devices", "4", "train.py"], "4,5"),  # a user's choice
    ],
)
def test_devices_of_the_launcher_become_visible(visible, options, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    name_devices(options, environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["python", "-m", LAUNCHER, "train.py"], ["train.py"]),
        (["python", "-u", "-X", "dev", "-m", LAUNCHER, "--nnodes", "2"], ["--nnodes", "2"]),
        (["python", "tools/supervise.py", "--", "python", "-m", LAUNCHER], None),
        (["python", "-m", "pytest", LAUNCHER], None),
        (["python"], None),
    ],
)
def test_the_launcher_is_distinguished_from_programs_that_name_it(argv, options):
    assert launcher_options(argv) == options


@pytest.mark.parametrize(("program", "expected"), [(LAUNCHER, "0,1 2"), ("pip", "None 1")])
def test_the_installed_line_runs_when_an_interpreter_starts(tmp_path, program, expected):
    install(tmp_path)
    code = (  # a directory may be met twice, by a symbolic link (lib64)
        f"import os, site, sys; sys.orig_argv = ['python', '-m', {program!r}, '--devices', '0,1', 'x.py']\n"
        f"import threading; site.addsitedir({str(tmp_path)!r}); site.addsitedir({str(tmp_path)!r})\n"
        "print(os.environ.get('CUDA_VISIBLE_DEVICES'), threading.active_count())"
    )
    environ = {"PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == expected
    assert done.stderr == ""
