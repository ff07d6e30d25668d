"""``device_report.json`` and ``.txt``: what the tests found on which machine and device, to be sent in."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import ppfleetx
from tests.device.place import place
from tests.helpers.programs import ROOT

MARKER = "device"
FORMAT = 1
_VARIABLES = (
    *("CUDA_", "NVIDIA_", "NCCL_", "ASCEND_", "HCCL_", "XPU_", "BKCL_", "CUSTOM_DEVICE_", "FLAGS_"),
    *("PPFLEETX_", "OMP_", "LD_LIBRARY_PATH"),
)
_PACKAGES = (
    "paddlepaddle-gpu", "paddlepaddle-xpu", "paddle-custom-npu", "paddlepaddle", "numpy", "safetensors",
    "tokenizers",
)  # fmt: skip
_SMI = [
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,compute_cap,clocks.max.sm",
    "--format=csv",
]
_LONGEST_MESSAGE, _LONGEST_NUMBER = 6000, 300


class DeviceReport:
    """A plugin of pytest that collects the outcomes of tests marked ``device`` and writes them at the end.

    Args:
        path: of the JSON file; the text goes beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.time()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the three phases of a test has ended."""
        if MARKER not in report.keywords:
            return
        known = report.nodeid in self._tests
        if report.when == "call" or report.outcome != "passed" or not known:
            entry = {"test": report.nodeid, "outcome": _outcome(report), "seconds": round(report.duration, 2)}
            entry["numbers"] = dict(report.user_properties)
            if report.outcome != "passed":
                entry["message"] = _message(report)
            self._tests[report.nodeid] = entry

    def pytest_sessionfinish(self) -> None:
        """Write both files, if a test has run."""
        if self._has_run:
            found = self.content()
            self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            self.text_path.write_text(text_of(found), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where they are."""
        if self._has_run:
            terminalreporter.write_line(f"device report: {self.path}, {self.text_path} (docs/gpu.md)")

    @property
    def text_path(self) -> Path:
        """The file for people."""
        return self.path.with_suffix(".txt")

    @property
    def _has_run(self) -> bool:
        return bool(self._tests) and not place().obstacle

    def content(self) -> dict[str, Any]:
        """All that is known."""
        tests = list(self._tests.values())
        return {
            "format": FORMAT,
            "device": place().device,
            "is_reference": place().is_reference,
            "cards": place().cards,
            "began": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "machine": machine(),
            "outcomes": dict(Counter(test["outcome"] for test in tests)),
            "tests": tests,
        }


def _outcome(report: pytest.TestReport) -> str:
    return "error" if report.outcome == "failed" and report.when != "call" else report.outcome


def _message(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext[-_LONGEST_MESSAGE:]


def machine() -> dict[str, Any]:
    """Versions, driver, cards, and the environment variables that change what they do."""
    return {
        "ppfleetx": ppfleetx.__version__,
        "commit": _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "paddle": _paddle(),
        "cards": _said(_SMI),
        "links": _said(["nvidia-smi", "topo", "-m"]),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def _paddle() -> dict[str, Any]:
    from paddle import version

    # Functions of the version module; builds for the CPU answer False.
    asked = {name: getattr(version, name)() for name in ("cuda", "cudnn", "nccl") if hasattr(version, name)}
    return {"version": version.full_version, "commit": version.commit, **asked}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(command: list[str]) -> str:
    """What a program prints; "": it is not here, or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def text_of(found: dict[str, Any]) -> str:
    """The same for people: what failed comes first."""
    about = found["machine"]
    kind = "the reference device" if found["is_reference"] else found["device"]
    where = f"{found['cards']} cards of {kind}"
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found["outcomes"].items()))
    lines = [
        f"ppfleetx {about['ppfleetx']} ({about['commit'] or 'no git checkout'}), {where}: {counts}",
        f"Paddle {about['paddle']}, Python {about['python']}, {about['system']}",
        *about["cards"].splitlines(),
        "",
        "To tell us, attach device_report.json and this file to an issue. They hold environment variables",
        f"whose names begin with {', '.join(_VARIABLES)}, and no others.",
    ]
    for outcome in ("failed", "error", "passed", "skipped"):
        chosen = [test for test in found["tests"] if test["outcome"] == outcome]
        lines += ["", f"{outcome}: {len(chosen)}"] if chosen else []
        for test in chosen:
            numbers = ", ".join(f"{name} {_short(value)}" for name, value in test["numbers"].items())
            lines.append(f"  {test['test']} ({test['seconds']} s) {numbers}".rstrip())
            if test.get("message"):
                lines.append(f"      {test['message'].strip().splitlines()[-1]}")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_NUMBER else "(in the JSON file)"
