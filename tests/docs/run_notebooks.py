"""Execute the notebooks of docs/, each in a kernel of its own (`make docs-test`).

    python -m tests.docs.run_notebooks           # all of them; nothing is written
    python -m tests.docs.run_notebooks --write   # keep what they give, for the site

Ends with 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.docs.blocks import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"
_SECONDS = 600
_DIRECTORIES = re.compile(r"/\S*/(?:tmp|notebook-|ppfleetx-)\w*/")  # that were made for it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    args = parser.parse_args()
    failed = 0
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            notebook = executed(path)
        except CellExecutionError as error:
            failed += 1
            print(f"FAIL {path.name}\n{error}", flush=True)
            continue
        print(f"ok   {path.name}", flush=True)
        if args.write:
            nbformat.write(notebook, path)
    return 1 if failed else 0


def executed(path: Path) -> Any:
    """The notebook with its outputs, without what differs from machine to machine.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="notebook-") as directory:
        client = NotebookClient(
            notebook,
            timeout=_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": directory}},
        )
        client.execute(env={**os.environ, "TMPDIR": directory, "JUPYTER_PLATFORM_DIRS": "1"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            _make_plain(output)
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _make_plain(output: Any) -> None:
    """Without the places of this machine, and without lines that tell of it."""
    if output.get("output_type") == "stream":
        kept = [line for line in output["text"].splitlines(keepends=True) if not _of_machine(line)]
        output["text"] = _DIRECTORIES.sub("", "".join(kept))


def _of_machine(line: str) -> bool:
    return bool(re.search(r"CPU settings|memory: |predicted and measured", line))


if __name__ == "__main__":
    sys.exit(main())
