"""Check of ``ppfleetx doctor`` that all processes of a job agree on *facts*: versions, source code,
configuration, data, checkpoints and environment variables."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ppfleetx import __version__
from ppfleetx.config.message_text import ranks_text
from ppfleetx.config.yaml_dump import flat_values
from ppfleetx.doctor.files import fingerprints, starts
from ppfleetx.doctor.results import Row, Target, fail, ok, warn, within
from ppfleetx.utils.installed import LIBRARIES

Values = Mapping[str, Any]

_PACKAGE = Path(__file__).resolve().parents[1]
_VARIABLES = ("NCCL_", "HCCL_", "BKCL_", "FLAGS_", "NVIDIA_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")
_OF_A_RANK = ("FLAGS_selected_",)
_OF_A_MACHINE = ("_IFNAME", "NCCL_IB_HCA", "HCCL_IF_IP")  # names of interfaces may differ between machines
# These may differ between machines without harm: logs, cards, wiring.
_HARMLESS = ("NCCL_DEBUG", "NVIDIA_", "NCCL_TOPO", "NCCL_IB_GID_INDEX", "NCCL_NET_GDR", "FLAGS_logtostderr")
_SHOWN = 4
_UNREAD: Values = {"unread": True}
_READ_SECONDS = 40.0  # time limit for one fact; other processes wait longer


@dataclass(frozen=True)
class Fact:
    """Something that must be equal in all processes of a job, such as the versions of libraries.

    Attributes:
        name: name of the fact's row in the report.
        read: returns the values in this process, by name.
        fix: what to do if the values differ.
        of_node: whether only the first process of each machine reads the fact.
    """

    name: str
    read: Callable[[Target], Values]
    fix: str
    of_node: bool = False

    def read_in_process(self, target: Target) -> Values | None:
        """Read the fact and return its values in this process. Returns None if another process of this
        machine reads the fact, and ``_UNREAD`` if reading takes too long."""
        if self.of_node and target.local_rank != 0:
            return None
        try:
            return within(_READ_SECONDS, lambda: self.read(target))
        except TimeoutError:  # for example on a dead network file system
            return _UNREAD


def _versions(target: Target) -> Values:
    wanted = {"paddlepaddle", "paddlepaddle-gpu", *LIBRARIES.values()}
    mine = {name: version for name, version in _installed().items() if name in wanted or "nvidia" in name}
    return {"python": platform.python_version(), **mine, "ppfleetx": __version__}


def _installed() -> dict[str, str]:
    """Return the versions of all installed Python packages, by name. If a package is installed twice, this is
    the version that Python imports."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:
            found.setdefault(name.lower().replace("_", "-"), str(one.version))
    return found


def _sources(target: Target) -> Values:
    digests: dict[str, Any] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        relative = file.relative_to(_PACKAGE)
        folder = relative.parts[0] if len(relative.parts) > 1 else "."
        digest = digests.setdefault(folder, hashlib.sha256())
        digest.update(f"{relative}\n".encode() + file.read_bytes())
    return {folder: digest.hexdigest()[:12] for folder, digest in digests.items()}


def _configuration(target: Target) -> Values:
    if target.cfg is None:
        return {}
    return {key: repr(value) for key, value in flat_values(target.cfg.model_dump(mode="json"))}


def _variables(target: Target) -> Values:
    return {
        name: value
        for name, value in target.environ.items()
        if name.startswith(_VARIABLES)
        and not name.startswith((*_OF_A_RANK, *_HARMLESS))
        and not name.endswith(_OF_A_MACHINE)
    }


FACTS: tuple[Fact, ...] = (
    Fact("versions", _versions, "install the same versions on all machines"),
    Fact("sources", _sources, "use the same checkout of ppfleetx on all machines"),
    Fact("configuration", _configuration, "give all machines the same file and the same -o"),
    Fact(
        "data and tokenizer", fingerprints, "copy the same files to all machines, or share them", of_node=True
    ),
    Fact("checkpoints", starts, "copy the same checkpoint to all machines, or share it", of_node=True),
    Fact("variables", _variables, "set them alike for all processes: these change what is computed or sent"),
)
"""All facts that are compared."""


Facts = dict[str, Values | None]
"""The values of each fact in one process, by the fact's name; None if another process of this machine reads
the fact."""


def read_facts(target: Target, announce: Callable[[str], None]) -> Facts:
    """Read all :data:`FACTS`. ``announce`` is called with a fact's name before the fact is read."""
    found: Facts = {}
    for fact in FACTS:
        announce(fact.name)
        found[fact.name] = fact.read_in_process(target)
    return found


def digests(facts: Facts) -> dict[str, str | None]:
    """Return a hash of each fact's values, by the fact's name. The hash is None if another process of this
    machine reads the fact."""
    return {name: None if values is None else _digest(values) for name, values in facts.items()}


def _digest(values: Values) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def differing(answers: Sequence[Mapping[str, str | None]]) -> list[str]:
    """Return the names of the facts that differ between the processes, or that a process could not read.
    ``answers`` has one result of :func:`digests` per process."""
    hashes = {fact.name: {one.get(fact.name) for one in answers} - {None} for fact in FACTS}
    return [name for name, those in hashes.items() if len(those) > 1 or _digest(_UNREAD) in those]


def agreement_rows(answers: Mapping[int, Facts], names: Sequence[str]) -> Iterator[Row]:
    """Yield a report row for each of :data:`FACTS`.

    Args:
        answers: by rank, the values of the facts in ``names``.
        names: the facts that differ or that a process could not read. Their rows show the differences, or the
            ranks that could not read the fact. The rows of all other facts say "equal".
    """
    for fact in FACTS:
        values = {rank: facts.get(fact.name) for rank, facts in answers.items()}
        values = {rank: mine for rank, mine in values.items() if mine is not None}
        unread = [rank for rank, mine in values.items() if mine == _UNREAD]
        if fact.name in names and unread:
            text = f"not compared: {ranks_text(unread)} could not read it within {_READ_SECONDS:g} s"
            yield warn(fact.name, text, "is the file system slow, or dead? (ls, df)")
        elif fact.name in names and (differences := "; ".join(_differences(values))):
            yield fail(fact.name, differences, fact.fix)
        else:
            yield ok(fact.name, "equal on all processes")


def _differences(values: Mapping[int, Values]) -> Iterator[str]:
    keys = sorted({key for mine in values.values() for key in mine})
    unequal = [key for key in keys if len({str(mine.get(key)) for mine in values.values()}) > 1]
    for key in unequal[:_SHOWN]:
        ranks: dict[str, list[int]] = {}
        for rank, mine in sorted(values.items()):
            ranks.setdefault(str(mine[key]) if key in mine else "nothing", []).append(rank)
        yield f"{key} is " + ", ".join(f"{value} on {ranks_text(those)}" for value, those in ranks.items())
    if len(unequal) > _SHOWN:
        yield f"and {len(unequal) - _SHOWN} more"


def host_of(target: Target) -> str:
    """Return a name for this machine that is unique in the job: its host name and its address."""
    endpoint = target.environ.get("PADDLE_CURRENT_ENDPOINT", "")
    return f"{socket.gethostname()} {endpoint.rpartition(':')[0]}".strip()
