import subprocess
import sys

import pytest

from ppfleetx.utils.cpu_launcher import LAUNCHER, install, name_devices


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--devices", "0,1", "train.py"], "0,1"),
        (["--log_dir", "log", "--devices=0, 1,2", "train.py", "-c", "x.yaml"], "0,1,2"),
        (["--gpus", "3", "train.py"], "3"),
        (["--nproc_per_node", "2", "train.py"], None),
        (["--nproc_per_node", "2", "train.py", "--devices", "0"], None),
    ],
)
def test_devices_of_the_launcher_become_visible(options, expected):
    environ = {}
    name_devices(["python", "-m", LAUNCHER, *options], environ)
    assert environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_a_users_choice_stays():
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    name_devices(["python", "-m", LAUNCHER, "--devices", "4", "train.py"], environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "4,5"}


def test_other_programs_are_left_alone():
    environ = {}
    name_devices(["python", "train.py", "--devices", "0"], environ)
    assert environ == {}


@pytest.mark.parametrize(("program", "expected"), [(LAUNCHER, "0,1"), ("pip", "None")])
def test_the_installed_line_runs_when_an_interpreter_starts(tmp_path, program, expected):
    install(tmp_path)
    code = (
        f"import os, site, sys; sys.orig_argv = ['python', '-m', {program!r}, '--devices', '0,1', 'x.py']\n"
        f"site.addsitedir({str(tmp_path)!r})\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    )
    environ = {"PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == expected
    assert done.stderr == ""
