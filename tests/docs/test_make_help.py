"""`make help`: a table, however long a target's name is."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_texts_stand_in_one_column() -> None:
    # `make test` runs this under another make, which would say which directory is entered.
    command = ["make", "--no-print-directory", "help"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names, texts = zip(*(line.split(maxsplit=1) for line in lines.splitlines()), strict=True)
    assert {"help", "quickstart", "test"} <= {*names}
    columns = {
        line.index(text, len(name)) for line, name, text in zip(lines.splitlines(), names, texts, strict=True)
    }
    assert columns == {max(map(len, names)) + 2}
