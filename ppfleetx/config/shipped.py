"""The configuration files that ship with ppfleetx, by names such as ``gpt/pretrain_gpt_345M_single_card``."""

from __future__ import annotations

import difflib
import os
import re
from functools import cache
from itertools import takewhile
from pathlib import Path

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import shown_path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
_BASES = "_base_"
_TOPIC = "nlp/"  # left out of names, because it is the only topic
_SUFFIX = ".yaml"
_PLACES = ("ppfleetx/configs/", "configs/", _TOPIC)  # folders that a user may write before the name


@cache
def shipped_configs() -> dict[str, Path]:
    """All shipped configuration files by name, sorted, without those in ``_base_``."""
    names = {}
    for path in sorted(CONFIGS.rglob(f"*{_SUFFIX}")):
        place = path.relative_to(CONFIGS)
        if place.parts[0] != _BASES:
            names[place.as_posix().removeprefix(_TOPIC).removesuffix(_SUFFIX)] = path
    return names


def find_config(given: str | Path) -> Path:
    """Return the path of a configuration, given as a path or as the name of a shipped configuration.

    The folder and the ending ``.yaml`` of a shipped configuration may be left out. If ``given`` is neither an
    existing path nor a shipped configuration, but is absolute or ends in ``.yaml`` or ``.yml``, it is
    returned unchanged. The code that reads it reports the error.

    Raises:
        ConfigError: ``given`` is none of these.
    """
    given = Path(given)
    if os.path.lexists(given):
        return given
    name = given.as_posix()
    for place in _PLACES:
        name = name.removeprefix(place)
    known = shipped_configs()
    bare = name.removesuffix(_SUFFIX)
    last = {key.rpartition("/")[2]: path for key, path in known.items()}
    found = known.get(bare) or last.get(bare)
    if found is not None:
        return found
    if given.is_absolute() or given.suffix in (_SUFFIX, ".yml"):
        return given  # reading it reports that it does not exist
    near = difflib.get_close_matches(bare, known, n=3, cutoff=0.4)
    near = near or [name for name in known if bare and bare.lower() in name.lower()][:3]
    meant = f"The nearest are {', '.join(near)}; " if near else ""
    raise ConfigError(
        f"there is no such file, and no configuration of this name ships with ppfleetx. {meant}`ppfleetx "
        "configs` lists all",
        place=shown_path(given),
    )


def purpose(path: Path) -> str:
    """The first sentence of a shipped file's opening comment, which says what the configuration is for."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in comment)
    return re.split("[.;] ", text)[0].rstrip(".")


def copy_config(name: str, directory: Path) -> list[Path]:
    """Copy a shipped configuration file and its ``_base_`` files into ``directory``.

    Returns the files written. Files that already have the same content are not among them.

    Raises:
        ConfigError: the file is not a shipped one, a target exists with other content, or writing failed.
    """
    known = shipped_configs()
    path = known.get(name) or find_config(name)
    if path not in known.values():
        raise ConfigError(
            f"{shown_path(path)} does not ship with ppfleetx; `ppfleetx configs` lists what does"
        )
    texts = {directory / place: text for place, text in _with_bases(path).items()}
    for target, text in texts.items():
        if os.path.lexists(target) and not (target.is_file() and target.read_text("utf-8") == text):
            raise ConfigError(f"{target} already exists with different content; nothing was copied")
    written = [target for target in texts if not target.exists()]
    try:
        for target in written:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(texts[target], "utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.filename}: {error.strerror}", key="DIR", value=str(directory)
        ) from error
    return written


def _with_bases(path: Path) -> dict[str, str]:
    """Prepare a copy of a configuration file and its ``_base_`` files. Returns {path in the copy: content}.

    The paths are relative to the directory of the copy. ``_base_`` entries in the contents are changed to
    these paths.
    """
    text = path.read_text("utf-8")
    line = next((line for line in text.splitlines() if line.startswith(f"{_BASES}:")), "")
    bases = [word.strip() for word in line.partition(":")[2].strip(" []").split(",") if word.strip()]
    own, copied = _place_in_copy(path), line
    for base in bases:
        copied = copied.replace(base, os.path.relpath(_place_in_copy(path.parent / base), Path(own).parent))
    found = {own: text.replace(line, copied, 1) if line else text}
    for base in bases:
        found |= _with_bases((path.parent / base).resolve())
    return found


def _place_in_copy(path: Path) -> str:
    return f"{_BASES}/{path.name}" if path.parent.name == _BASES else path.name
