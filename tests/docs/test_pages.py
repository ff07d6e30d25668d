"""The menu, links, anchors and generated pages of docs/, checked without mkdocs; the messages that
docs/troubleshooting.md explains are messages of the code; notebooks are committed as they were executed."""

import ast
import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OF_THE_ROOT = ["README.md", "README_cn.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = sorted(DOCS.rglob("*.md")) + [ROOT / name for name in OF_THE_ROOT]
_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


class _MenuLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without running what its ``!!python`` tags name."""


_MenuLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@cache
def site_hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def menu() -> dict:
    return yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _MenuLoader)


def entries(nav) -> list[str]:
    if isinstance(nav, list):
        return [name for entry in nav for name in entries(entry)]
    return [name for entry in nav.values() for name in entries(entry)] if isinstance(nav, dict) else [nav]


def without_code(path: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text("utf-8")))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    text = _FENCE.sub("", path.read_text("utf-8"))
    headings = re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE)
    explicit = re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings} | set(
        explicit
    )


def test_every_page_stands_in_the_menu_once():
    named = entries(menu()["nav"])
    generated = {site_hooks().MODULES, *site_hooks().ROOT_FILES}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(name for name in named if name not in generated) == sorted(pages), (
        "add the page to mkdocs.yml"
    )
    assert generated <= set(named)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for target in _LINK.findall(without_code(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(there), (
                f"{path.name} links to {target}: {there.name} has no such heading"
            )
        if path.is_relative_to(DOCS) and name:
            of_the_site = there.is_relative_to(DOCS) or there in [
                ROOT / file for file in site_hooks().ROOT_FILES.values()
            ]
            assert of_the_site, (
                f"{path.name} links to {target}, which the site does not have: write it as `code`"
            )


def test_pages_named_in_the_code_are_there():
    files = [
        path
        for folder in ("ppfleetx", "tools", "tasks", "projects", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path.suffix in {".py", ".yaml", ".sh", ".json"}
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text("utf-8"))
        if not (ROOT / name).exists()
    }
    assert not missing, missing


def test_the_module_pages_are_those_of_the_packages():
    hooks = site_hooks()
    texts = hooks.generated_pages()
    assert "modules/conversion.huggingface.md" in texts
    assert "::: ppfleetx.parallel.step_runner" in texts["modules/parallel.md"]
    assert "](architecture.md)" in texts["contributing.md"]
    assert hooks.on_config(type("Config", (), {"nav": [{"Modules": "modules/"}]})()).nav[0]["Modules"][0] == {
        "ppfleetx": "modules/ppfleetx.md"
    }


TROUBLES = DOCS / "troubleshooting.md"
QUOTED = re.findall(r"^\*\*(.*`.*`.*)\*\*$", TROUBLES.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def texts_of_the_code() -> tuple[str, ...]:
    """Every literal text, those with values in them with ``…`` in the values' place."""
    texts = []
    for path in sorted((ROOT / "ppfleetx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_part(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return tuple(texts)


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def test_the_page_explains_enough():
    assert len(re.findall(r"^\*\*", TROUBLES.read_text(encoding="utf-8"), re.MULTILINE)) >= 20
    assert len(QUOTED) >= 12


def test_the_translated_page_explains_the_same_messages():
    translated = DOCS / "zh" / "troubleshooting.md"
    quoted = [
        re.findall(r"^\*\*(.*)\*\*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        for page in (TROUBLES, translated)
    ]
    messages, translated_messages = ([re.findall(r"`[^`]*`", heading) for heading in page] for page in quoted)
    assert messages == translated_messages


@pytest.mark.parametrize("heading", QUOTED)
def test_a_quoted_message_is_one_of_the_code(heading):
    for quoted in re.findall(r"`([^`]*)`", heading):
        if quoted.startswith("avg_"):
            continue  # a word of the log line
        fragments = [piece.strip(" ,") for piece in re.split(r"…|[A-Z]{4,}", quoted)]
        longest = max(fragments, key=len)
        assert len(longest) >= 7, f"{quoted!r} says too little to be found"
        assert any(longest in text for text in texts_of_the_code()), f"no message has {longest!r}"


@pytest.mark.parametrize("path", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_outputs_are_committed(path: Path) -> None:
    text = path.read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}, "no errors"
    assert "image/png" in text and len(text) < 100_000
    assert "/tmp/" not in text
