"""Hooks for `mkdocs.yml`: pages made from docstrings, and pages for files of the project's root."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = "modules/"
ROOT_FILES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}

_LINK_INTO_DOCS = re.compile(r"(\]\()docs/")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):(?=<code)")
_LINK_TO_ROOT = re.compile(r"\]\((?:\.\./)*([A-Z]+)\.md\)")


def on_config(config: Any) -> Any:
    """Put the module pages in place of ``modules/`` in `nav`."""
    config.nav = _with_modules(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, which are not files in docs/."""
    from mkdocs.structure.files import File

    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links to CONTRIBUTING.md and similar files to their pages on the site."""
    up = "../" * page.file.src_uri.count("/")
    return _LINK_TO_ROOT.sub(lambda match: f"]({up}{match[1].lower()}.md)", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Remove roles such as ``:class:`` from ``:class:`Name` `` in docstrings."""
    return _ROLE.sub("", html)


def generated_pages() -> dict[str, str]:
    """Return the texts of generated pages, by page name: the module page of each package, and files of the
    project's root with links that work in docs/."""
    pages = {module_page(package): _module_text(package) for package in packages()}
    for page, name in ROOT_FILES.items():
        pages[page] = _LINK_INTO_DOCS.sub(r"\1", (ROOT / name).read_text("utf-8"))
    return pages


def packages() -> list[str]:
    """Return the dotted names of all packages of ppfleetx, except packages of shipped YAML files."""
    files = sorted((ROOT / "ppfleetx").rglob("__init__.py"))
    names = [".".join(path.parent.relative_to(ROOT).parts) for path in files]
    return [name for name in names if not name.startswith("ppfleetx.configs")]


def module_page(package: str) -> str:
    """Return the name of a package's page."""
    return f"{MODULES}{package.removeprefix('ppfleetx').strip('.') or 'ppfleetx'}.md"


def _module_text(package: str) -> str:
    folder = ROOT / Path(*package.split("."))
    init = ast.parse((folder / "__init__.py").read_text("utf-8"))
    lines = [f"# {package}", "", ast.get_docstring(init) or "", ""]
    for path in sorted(folder.glob("*.py")):
        if path.stem != "__init__":
            lines += [f"::: {package}.{path.stem}", ""]
    return "\n".join(lines)


def _with_modules(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_with_modules(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _with_modules(entry) for title, entry in nav.items()}
    if nav == MODULES:
        return [{package: module_page(package)} for package in packages()]
    return nav
