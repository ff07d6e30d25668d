"""Every shell command of the pages can be tried; a few are (`make docs-test` runs all)."""

from pathlib import Path

import pytest

from tests.docs import scene
from tests.docs.blocks import Block, Command, blocks, commands, given, only_the_tool, to_run, with_words
from tests.docs.run_pages import pages, run_page

ROOT = scene.ROOT


def block(text: str, mark: str = "") -> Block:
    return Block(Path("page.md"), 10, "shell", None, text, mark)


def tried(text: str, mark: str = "") -> list[tuple[int, str | None]]:
    return [(command.line, to_run(command)) for command in commands(block(text, mark))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_can_be_pasted(page):
    for name in given(page):
        assert name in scene.MAKERS or name in scene.COMMANDS
    for piece in blocks(page):
        if piece.is_shell:
            for command in commands(piece):
                to_run(command)
                assert "…" not in command.text and " ..." not in command.text, (
                    f"{command.place}: {command.text}"
                )


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "zh").rglob("*.md")), ids=lambda page: page.stem)
def test_a_translated_page_has_the_same_commands(page):
    original = ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")
    here, there = (
        [(piece.language, piece.title, piece.text) for piece in blocks(path)] for path in (page, original)
    )
    assert here == there, "change both"


def test_commands_are_cut_at_their_ends():
    text = "# a remark\npython a.py \\\n    --b c   # why\n\ncat <<'EOF' > x\n# no remark\nEOF\nls"
    assert tried(text) == [
        (11, "python a.py \\\n    --b c"),
        (14, "cat <<'EOF' > x\n# no remark\nEOF"),
        (17, "ls"),
    ]
    with pytest.raises(ValueError, match="no end"):
        tried("ls \\")


def test_marks_decide_what_is_run():
    assert tried("rm -r x", "skip, removes") == [(10, None)]
    assert tried("ls", "with -l") == [(10, "ls -l")]
    with pytest.raises(ValueError, match="say why"):
        tried("ls", "skip")
    with pytest.raises(ValueError, match="no mark"):
        tried("ls", "sometimes")
    launched = "python -m paddle.distributed.launch --devices 0,1 tools/train.py \\\n -c a.yaml"
    assert tried(launched, "check") == [(10, "python tools/train.py -c a.yaml --check")]


def test_scripts_are_checked_by_their_configuration():
    text = "MASTER=a:1 ./projects/gpt/pretrain_gpt_175B_mp8_pp16.sh -o A.b=1"
    config = "ppfleetx/configs/nlp/gpt/pretrain_gpt_175B_mp8_pp16.yaml"
    assert only_the_tool(text) == f"python tools/train.py -c {config} -o A.b=1"
    with pytest.raises(ValueError, match="only training"):
        only_the_tool("python tools/eval.py -c x")


def test_an_override_replaces_one_of_the_same_key():
    text = "python a.py -o A.b=1 -o 'A.c=[1, 2]' \\\n    -o A.bc=3"
    assert with_words(text, "-o A.b=9 -o A.c=[]") == "python a.py \\\n    -o A.bc=3 -o A.b=9 -o A.c=[]"


def test_marks_belong_to_the_next_block(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- test: exit 3 -->\n\n```shell\nexit 3\n```\n\n```shell\nexit 3\n```\nwords\n```text\nno\n```\n"
    )
    assert [(piece.line, piece.mark, piece.is_shell) for piece in blocks(page)] == [
        (4, "exit 3", True),
        (8, "", True),
        (12, "", False),
    ]
    first, second = run_page(page)
    assert (first.code, first.failed, second.code, second.failed) == (3, False, 3, True)
    assert isinstance(first.command, Command)


def test_a_page_of_checks():
    results = run_page(ROOT / "docs" / "tutorials" / "from_paddlefleetx.md")
    assert [result.failed for result in results] == [False] * len(results), [
        r.output for r in results if r.failed
    ]
    assert sum(result.code == 0 for result in results) >= 4
