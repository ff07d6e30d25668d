"""The libraries that ppfleetx imports: there, whole, new enough, and not hidden by others of their name."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.doctor.rows import Row, fail, ok
from ppfleetx.utils.installed import LIBRARIES, not_installed, version_of

if TYPE_CHECKING:
    from ppfleetx.doctor.case import Case

_CHECKED = {**LIBRARIES, "paddle": "paddlepaddle"}
_PACKAGE = str(Path(__file__).resolve().parents[1])


def libraries(case: Case) -> Iterator[Row]:
    """Each library that is needed, and Paddle: imported, its version, and where it comes from."""
    problems = [row for name, distribution in _CHECKED.items() for row in _problems(name, distribution)]
    yield from problems
    if not problems:
        found = (f"{name} {metadata.version(distribution)}" for name, distribution in LIBRARIES.items())
        yield ok("libraries", ", ".join(found))


def _problems(name: str, distribution: str) -> Iterator[Row]:
    """At most one row."""
    if name == "paddle":
        distribution = _paddle() or ""
        if not distribution or name not in sys.modules:
            return  # another check says so
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever a damaged library raises is a finding)
        yield broken_row(error, name)
        return
    version = version_of(distribution)
    if version is None:
        yield fail(name, f"{module.__file__} is of no installed package", _again(distribution))
    elif (place := _hides(name, distribution)) is not None:
        yield fail(
            name,
            f"{place} is imported, and not the {distribution} {version} that is installed: another copy "
            "comes first on the path",
            "take its directory out of PYTHONPATH, or do not start in it (python -c 'import sys; "
            "print(sys.path)')",
        )
    elif _differs(getattr(module, "__version__", None), version):
        yield fail(
            name,
            f"says that it is {module.__version__} and is installed as {distribution} {version}: files of "
            "two versions are mixed",
            _again(distribution),
        )
    elif wanted := _wanted(distribution, version):
        yield fail(name, f"{distribution} {version}: ppfleetx needs {wanted}", f"pip install '{wanted}'")


def broken_row(error: BaseException, name: str = "") -> Row:
    """What to say of an import that failed; ``name`` of the library, where it is known."""
    if isinstance(error, ModuleNotFoundError) and (said := not_installed(error)) is not None:
        row = fail("libraries", f"{error.name} is not installed", str(said))
        return replace(row, group="environment")
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    outside = [file for file in files if not file.startswith(("<", _PACKAGE, *_standard()))]
    known = (part for file in outside for part in Path(file).with_suffix("").parts if part in _CHECKED)
    name = name or next(known, "a library")
    where = f" ({outside[-1]})" if outside else ""
    text = f"{name} cannot be imported: {type(error).__name__}: {error}{where}"
    return replace(fail("libraries", text[:600], _again(_CHECKED.get(name, "NAME"))), group="environment")


def _standard() -> tuple[str, ...]:
    """Where Python's own modules are."""
    return (str(Path(traceback.__file__).parent / "importlib"),)


def _again(distribution: str) -> str:
    return (
        f"pip install --force-reinstall {distribution} with {sys.executable}; a library of the system that "
        "it needs (lib….so) comes with the system's packages"
    )


def _paddle() -> str | None:
    return next((name for name in ("paddlepaddle", "paddlepaddle-gpu") if version_of(name)), None)


def _hides(name: str, distribution: str) -> str | None:
    """The file that is imported, where it does not lie where the distribution was installed."""
    spec, found = find_spec(name), metadata.distribution(distribution)
    if spec is None or spec.origin is None or found.read_text("direct_url.json"):
        return None  # installed to be edited: it lies anywhere
    installed, origin = Path(str(found.locate_file(""))).absolute(), Path(spec.origin).absolute()
    # Some installers lay links to a store of their own: then the two agree before links are followed.
    lies_there = origin.is_relative_to(installed) or origin.resolve().is_relative_to(installed.resolve())
    return None if lies_there else spec.origin


def _differs(said: object, version: str) -> bool:
    """Whether the first two numbers of two versions are not the same; what is no version does not tell."""
    one, other = _numbers(said), _numbers(version)
    return bool(one) and one[:2] != other[:2]


def _numbers(version: object) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version) if isinstance(version, str) else None
    return [int(part) for part in found[0].split(".")] if found else []


def _wanted(distribution: str, version: str) -> str:
    """What ppfleetx's own metadata ask for, where the version is none of it; empty where it is."""
    try:
        asked = metadata.requires("ppfleetx") or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return ""
    for line in asked:
        found = re.match(r"([A-Za-z0-9_.-]+)([^;]*)$", line)
        if found and found[1].lower() == distribution and not all(_fits(version, found[2])):
            return f"{distribution}{found[2].strip()}"
    return ""


def _fits(version: str, conditions: str) -> Iterator[bool]:
    here = _numbers(version)
    for sign, bound in re.findall(r"(>=|<|==)\s*([\d.]+)", conditions):
        wanted = _numbers(bound)
        yield {">=": here >= wanted, "<": here < wanted, "==": here == wanted}[sign]
