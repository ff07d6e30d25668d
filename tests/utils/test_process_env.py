"""CPU settings follow the CPU's flags, respect the user's values, and do not load Paddle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ppfleetx.utils.process_env import mkl_cpu_type, thread_count
from tests.utils.python import ROOT, run_python

AVX512 = "avx2 avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", AVX512, "7"),
        ("AuthenticAMD", "avx2 avx512f", "5"),
        ("AuthenticAMD", "avx2", "5"),
        ("AuthenticAMD", "sse4_2", None),
        ("GenuineIntel", AVX512, None),
    ],
)
def test_mkl_path_follows_the_cpu(vendor: str, flags: str, expected: str | None) -> None:
    cpuinfo = f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\nbugs\t\t: avx512vl\n"
    assert mkl_cpu_type(cpuinfo) == expected


@pytest.mark.parametrize(
    ("environ", "cpus", "expected"),
    [({}, 2, 2), ({"PADDLE_LOCAL_SIZE": "2"}, 8, 4), ({"PADDLE_LOCAL_SIZE": "8"}, 2, 1)],
)
def test_ranks_share_the_cpus(environ: dict[str, str], cpus: int, expected: int) -> None:
    assert thread_count(environ, cpus) == expected


def prepared(**environ: str) -> str:
    """What a fresh process says after preparing itself, and the variables it then has."""
    program = (
        "import os; from ppfleetx.utils.process_env import prepare_process; print(prepare_process());"
        "print({k: os.environ.get(k) for k in ('MKL_DEBUG_CPU_TYPE', 'OMP_NUM_THREADS')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environ},
    )
    return done.stdout


def test_a_users_setting_is_kept() -> None:
    said = prepared(MKL_DEBUG_CPU_TYPE="4", OMP_NUM_THREADS="3", MALLOC_TOP_PAD_="1")
    assert "MKL_DEBUG_CPU_TYPE=4 (yours)" in said
    assert "OMP_NUM_THREADS=3 (yours)" in said
    assert "MALLOC_TOP_PAD_ yours" in said
    assert "{'MKL_DEBUG_CPU_TYPE': '4', 'OMP_NUM_THREADS': '3'}" in said


def test_it_can_be_switched_off() -> None:
    said = prepared(PPFLEETX_TUNE_CPU="0")
    assert "left alone" in said
    assert "{'MKL_DEBUG_CPU_TYPE': None, 'OMP_NUM_THREADS': None}" in said


def test_importing_the_package_imports_nothing_slow() -> None:
    program = "import sys, ppfleetx; print({'paddle', 'numpy', 'pydantic'} & set(sys.modules))"
    assert run_python(program).stdout == "set()\n"


def test_ctrl_c_while_paddle_starts_is_no_traceback(tmp_path):
    """Paddle's C++ makes an ImportError of it."""
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle/__init__.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.2)\n"
        "except KeyboardInterrupt:\n    raise ImportError('initialization failed') from None\n"
    )
    code = (
        "from ppfleetx.utils.exit_codes import run_tool\n"
        "from ppfleetx.utils.process_env import import_paddle\n"
        "run_tool(import_paddle)"
    )
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
