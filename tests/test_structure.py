"""Files that need each other cannot be read one after the other, so there are no circles of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imports(file: Path, module: str, modules: set[str]) -> Iterator[str]:
    """Modules of the package that a file names, at its top, in a function, or for a type checker alone:
    whoever reads the file has to know them all the same."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield from (n for n in (name if name in modules else source,) if n in modules)


def circle_in(root: Path) -> list[str] | None:
    """Modules below ``root``, each of which imports the next, the last being the first again."""
    files = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    assert files
    graph = {module: set(imports(file, module, set(files))) - {module} for module, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return None


def test_no_files_import_each_other():
    assert circle_in(ROOT / "ppfleetx") is None


def test_a_circle_is_found_however_it_is_written(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from package import b\n")
    (package / "b.py").write_text("def f():\n    import package.c\n")
    (package / "c.py").write_text("")
    assert circle_in(package) is None
    (package / "c.py").write_text("if TYPE_CHECKING:\n    from .a import A\n")
    circle = circle_in(package)
    assert circle is not None and set(circle) == {"package.a", "package.b", "package.c"}
