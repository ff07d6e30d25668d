"""Check of ``ppfleetx doctor`` that required libraries can be imported in a supported version."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.doctor.results import Row, fail, ok
from ppfleetx.utils.installed import LIBRARIES, not_installed

if TYPE_CHECKING:
    from ppfleetx.doctor.results import Target

_PACKAGE = str(Path(__file__).resolve().parents[1])


def libraries(target: Target) -> Iterator[Row]:
    problems = [row for name in LIBRARIES if (row := _problem(name)) is not None]
    yield from problems
    if not problems:
        found = (f"{name} {metadata.version(distribution)}" for name, distribution in LIBRARIES.items())
        yield ok("libraries", ", ".join(found))


def _problem(name: str) -> Row | None:
    distribution = LIBRARIES[name]
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever a damaged library raises is a finding)
        return broken_row(error, name)
    version, wanted = metadata.version(distribution), _required(distribution)
    if wanted and not wanted.contains(version, prereleases=True):
        text = f"{distribution}{wanted}"
        return fail(name, f"{distribution} {version}: ppfleetx needs {text}", f"pip install '{text}'")
    return None


def _required(distribution: str):
    """Return the version range that ppfleetx's metadata requires of a library, such as ``>=2,<3``. Returns
    None if there is no requirement, or the metadata cannot be read."""
    try:
        from packaging.requirements import Requirement

        wanted = map(Requirement, metadata.requires("ppfleetx") or [])
    except (metadata.PackageNotFoundError, ImportError):
        return None
    return next((one.specifier for one in wanted if one.name == distribution and one.marker is None), None)


def broken_row(error: BaseException, name: str = "") -> Row:
    """Return the report row for a library that cannot be imported. If ``name`` is empty, the library's name
    is found in the traceback of ``error``."""
    if isinstance(error, ModuleNotFoundError) and (said := not_installed(error)) is not None:
        row = fail("libraries", f"{error.name} is not installed", str(said))
        return replace(row, group="environment")
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    outside = [file for file in files if not file.startswith(("<", _PACKAGE)) and "importlib" not in file]
    known = (part for file in outside for part in Path(file).with_suffix("").parts if part in LIBRARIES)
    name = name or next(known, "a library")
    where = f" ({outside[-1]})" if outside else ""
    text = f"{name} cannot be imported: {type(error).__name__}: {error}{where}"
    fix = (
        f"pip install --force-reinstall {LIBRARIES.get(name, 'NAME')} with {sys.executable}; a system "
        "library that it needs (lib….so) comes with the system's packages"
    )
    return replace(fail("libraries", text[:600], fix), group="environment")
