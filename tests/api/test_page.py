"""The snippets of docs/api.md, one after the other in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs/api.md"


def test_every_snippet_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(found) >= 7
    names: dict[str, object] = {"__name__": "page"}
    for block in found:
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "GPT(2 layers, hidden 64" in printed and "text_generation_text" in printed
    assert (here / "saved_hf/config.json").is_file() and (here / "third_run/epoch_0_step_2").is_dir()
