"""Run the shell commands of README and docs/, each page in a scratch directory (`make docs-test`).

    python -m tests.docs.run_pages                     # all pages
    python -m tests.docs.run_pages docs/quickstart.md  # one page

Prints place, seconds, exit code and command of each. Ends with 1 if a command did not end as the page says.
tests/docs/blocks.py lists the marks by which a page says how a command is tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.docs import scene
from tests.docs.blocks import Command, blocks, commands, exit_code, given, is_server, port, to_run

ROOT = scene.ROOT
_SECONDS = 600.0


@dataclass(frozen=True)
class Result:
    """How one command ended; `code` is None for one that was not run."""

    command: Command
    code: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        return self.code is not None and self.code != exit_code(self.command)


def pages() -> list[Path]:
    """The pages whose commands are tried. Those of docs/zh have the same ones (a test)."""
    docs, translated = ROOT / "docs", ROOT / "docs" / "zh"
    return [
        ROOT / "README.md",
        ROOT / "README_cn.md",
        *(page for page in sorted(docs.rglob("*.md")) if translated not in page.parents),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="all pages, if none is named")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this directory and leave it there")
    args = parser.parse_args()
    results, unset = [], []
    for page in [path.resolve() for path in args.pages] or pages():
        try:
            results += run_page(page, args.keep)
        except scene.SceneError as error:
            unset.append(page)
            print(f"FAIL {page.name}: what the page is given could not be made: {error}", flush=True)
    failed = [result for result in results if result.failed]
    for result in failed:
        print(f"\n--- {result.command.place}: exit code {result.code}\n{result.command.text}")
        print(result.output[-3000:])
    ran = [result for result in results if result.code is not None]
    count = len(failed) + len(unset)
    print(f"{len(ran)} commands run, {len(results) - len(ran)} skipped, {count} failed")
    return 1 if count else 0


def run_page(page: Path, keep: Path | None = None) -> list[Result]:
    """Run all commands of a page in order; the first that fails ends the page."""
    if not any(block.is_shell for block in blocks(page)):
        return []
    directory = (keep or Path(tempfile.mkdtemp(prefix="docs-test-"))) / page.stem
    try:
        scene.make(directory)
        if any(block.is_shell and not block.mark.startswith("skip") for block in blocks(page)):
            for name in given(page):
                scene.provide(name, directory)
        return run_commands(page, directory, scene.environment(directory))
    finally:
        if keep is None:
            shutil.rmtree(directory.parent)


def run_commands(page: Path, directory: Path, environment: Mapping[str, str]) -> list[Result]:
    """Run them in ``directory``, where the page's files are written, too, and end the servers at last."""
    servers: list[subprocess.Popen] = []
    results: list[Result] = []
    try:
        for block in blocks(page):
            if block.title is not None:
                (directory / block.title).write_text(block.text + "\n", "utf-8")
            for command in commands(block) if block.is_shell else ():
                results.append(run_command(command, directory, servers, environment))
                print(_line(results[-1]), flush=True)
                if results[-1].failed:
                    return results
    finally:
        for server in servers:
            _end(server)
    return results


def run_command(
    command: Command, directory: Path, servers: list[subprocess.Popen], environment: Mapping[str, str]
) -> Result:
    """Run one command, or start it when it serves."""
    text = to_run(command)
    if text is None:
        return Result(command, None, 0.0, "")
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=(directory / "output.txt").open("w") if is_server(command) else subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if is_server(command):
        servers.append(process)
        code = _wait_for_health(process, port(text))
        output = (directory / "output.txt").read_text()
    else:
        code, output = _wait(process)
    return Result(command, code, time.monotonic() - began, output)


def _wait(process: subprocess.Popen) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        _end(process)
        return 124, f"not done after {_SECONDS:.0f} s"
    return process.returncode, output


def _wait_for_health(process: subprocess.Popen, port: int) -> int:
    """0 when the server answers, else its exit code; 124 when it never does."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return process.returncode or 1
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return 0
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return 124


def _end(process: subprocess.Popen) -> None:
    """End a command and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _line(result: Result) -> str:
    word = "skip" if result.code is None else "FAIL" if result.failed else "ok"
    first = result.command.text.splitlines()[0]
    return f"{word:5}{result.command.place:32} {result.seconds:6.1f} s  {result.code}  {first[:100]}"


if __name__ == "__main__":
    sys.exit(main())
