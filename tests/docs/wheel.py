"""Build the wheel, install it into a fresh environment, and run docs/installed.md there (`make docs-test`).

    python -m tests.docs.wheel [--work DIR]

Nothing may be read from the checkout: the page runs in a directory of its own, with an environment that does
not know the checkout, and each command is asked where its package lies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import ROOT
from tests.docs.run_pages import run_commands

PAGE = ROOT / "docs/installed.md"
EXTRAS = "cpu,serve"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="work here and leave it there")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="ppfleetx-wheel-"))
    try:
        wheel = build(work)
        python = install(wheel, work)
        return run_page(python, work)
    finally:
        if args.work is None:
            shutil.rmtree(work)


def build(work: Path) -> Path:
    """The wheel of the files that git knows, made in a copy of them."""
    source = work / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    tools = new_environment(work / "tools", "build")
    _run([tools, "-m", "build", "--outdir", work / "dist", source], work)
    [wheel] = (work / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, work: Path) -> Path:
    """A fresh environment's Python, with the wheel."""
    return new_environment(work / "fresh", f"{wheel}[{EXTRAS}]")


def new_environment(directory: Path, *packages: str) -> Path:
    """The Python of a new virtual environment with these packages."""
    _run([sys.executable, "-m", "venv", directory], directory.parent)
    python = directory / "bin/python"
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], directory)
    return python


def run_page(python: Path, work: Path) -> int:
    """Run the page; 1 when a command failed."""
    scene = work / "scene"
    scene.mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PADDLE_", "PPFLEETX_", "FLAGS_", "PYTHON", "VIRTUAL_ENV"))
    }
    environment |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(scene)}
    where = subprocess.run(
        [python, "-c", "import ppfleetx; print(ppfleetx.__file__)"],
        cwd=scene,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(where).is_relative_to(work / "fresh"), where
    results = run_commands(PAGE, scene, environment)
    leaks = [result for result in results if str(ROOT) in result.output]
    for result in (*(result for result in results if result.failed), *leaks):
        print(f"{result.command.place} failed, or names the checkout:\n{result.output[-4000:]}")
    return int(bool(leaks) or any(result.failed for result in results))


def _run(command: list[object], directory: Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{command} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
