"""No circles of imports: such files cannot be read one after the other. One file knows kinds of devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from grimp import build_graph

ROOT = Path(__file__).parents[1]


def circle_in(package: str) -> list[str] | None:
    """Modules of ``package``, each of which imports the next, the last being the first again: at its top, in
    a function, or for a type checker alone."""
    modules = build_graph(package, cache_dir=None)
    graph = {name: modules.find_modules_directly_imported_by(name) for name in modules.modules}
    assert graph
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return None


def test_no_files_import_each_other():
    assert circle_in("ppfleetx") is None


def test_a_circle_is_found_however_it_is_written(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from a_package import b\n")
    (package / "b.py").write_text("def f():\n    import a_package.c\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    from .a import A\n")
    monkeypatch.syspath_prepend(tmp_path)
    circle = circle_in("a_package")
    assert circle is not None and set(circle) == {"a_package.a", "a_package.b", "a_package.c"}


KINDS = {"gpu", "xpu", "npu"}
OF_PADDLE = {"CUDAPlace", "CUDAPinnedPlace", "XPUPlace", "CustomPlace", "pin_memory"}
OF_PADDLE |= {"is_compiled_with_cuda", "is_compiled_with_xpu", "get_all_custom_device_type"}
"""What Paddle has for one kind of device; and ``paddle.device.cuda``, ``paddle.device.xpu``."""
KNOWS_KINDS = {
    "ppfleetx/distributed/device.py": "this is the file",
    "ppfleetx/utils/gpu_operators.py": "whose kernels the table has",
    "ppfleetx/planner/cards.py": "whose kernels are counted, a word of the planner's",
    "ppfleetx/dialects/mindformers/dialect.py": "a word of another program's",
    "ppfleetx/dialects/megatron/training_rules.py": "a word of another program's",
    "ppfleetx/dialects/paddleformers/dialect.py": "a word of another program's",
}
"""Files that may, and why."""


def kinds_of_devices_in(source: str) -> Iterator[int]:
    """Lines that ask Paddle for one kind of device, or compare with the name of one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            outer = node.value.attr if isinstance(node.value, ast.Attribute) else ""
            if node.attr in OF_PADDLE or (outer == "device" and node.attr in ("cuda", "xpu")):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            for side in ast.walk(node):
                name = side.id if isinstance(side, ast.Name) else getattr(side, "value", None)
                if isinstance(name, str) and name.lower() in KINDS and (name.isupper() or name.islower()):
                    yield node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "cuda"):
            if node.func.attr == "cuda" and not isinstance(node.func.value, ast.Attribute):
                yield node.lineno
            yield from (node.lineno for one in node.args if getattr(one, "value", None) in KINDS)


def test_one_file_knows_kinds_of_devices():
    files = [
        file for part in ("ppfleetx", "tools", "tasks", "projects") for file in (ROOT / part).rglob("*.py")
    ]
    found = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if (lines := sorted(set(kinds_of_devices_in(file.read_text(encoding="utf-8")))))
    }
    assert {file: lines for file, lines in found.items() if file not in KNOWS_KINDS} == {}
    assert sorted(KNOWS_KINDS) == sorted(found), "a file needs no exception any more"


def test_a_kind_of_device_is_found_however_it_is_asked_for():
    asked = (
        'device == "gpu"',
        'kind in ("npu", "xpu")',
        "ctx.device == GPU",
        'device.startswith("gpu")',
        "paddle.device.cuda.Event()",
        "paddle.CUDAPinnedPlace()",
        "tensor.cuda()",
        "paddle.is_compiled_with_cuda()",
    )
    assert [line for line in asked if not list(kinds_of_devices_in(line))] == []
    assert list(kinds_of_devices_in('log("gpu"); on_gpu(); x = GPU; paddle.version.cuda()')) == []
