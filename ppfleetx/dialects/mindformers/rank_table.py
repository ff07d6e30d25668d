"""Convert the arguments of MindFormers' ``run_distribute.sh``, such as a rank table and a range of devices,
to arguments of Paddle's launcher."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainSerializer, ValidationError

from ppfleetx.config.errors import UNSET, ConfigError
from ppfleetx.config.field_types import MAX_RANKS
from ppfleetx.config.message_text import counted
from ppfleetx.config.reading.parse import read_text
from ppfleetx.dialects.mindformers.command_line import RUN_MODES
from ppfleetx.utils.device_support import expected_device
from ppfleetx.utils.output_files import atomic_write, writing

_ELSEWHERE = ("192.0.2.1", 9)  # an address reserved for documentation (RFC 5737); nothing is sent
_Number = Annotated[int, Field(ge=0, lt=MAX_RANKS), PlainSerializer(str)]  # written as a string


class Device(BaseModel):
    device_id: _Number
    device_ip: str = ""
    rank_id: _Number


class Server(BaseModel):
    server_id: Annotated[str, Field(min_length=1)]
    device: Annotated[list[Device], Field(min_length=1)]
    host_nic_ip: Any = "reserve"  # in the file format, but unused

    @property
    def ranks(self) -> list[int]:
        return sorted(device.rank_id for device in self.device)


class RankTable(BaseModel):
    """The content of a rank table file: all hosts of a job with their devices, in rank order."""

    version: Any = "1.0"
    server_count: _Number
    server_list: Annotated[list[Server], Field(min_length=1)]
    status: Literal["completed"] = "completed"

    @property
    def num_ranks(self) -> int:
        return sum(len(server.device) for server in self.server_list)


def read_rank_table(path: Path) -> RankTable:
    place = str(path)
    try:
        table = RankTable.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].replace("Input should be", "must be")
        key = ".".join(map(str, first["loc"])) or None
        value = UNSET if key is None else first["input"]
        raise ConfigError(f"is not a rank table: {rule}", key=key, value=value, place=place) from None
    servers = table.server_list
    if table.server_count != len(servers):
        hosts = counted(len(servers), "host")
        raise ConfigError(
            f"server_list has {hosts}", key="server_count", value=table.server_count, place=place
        )
    _refuse_twice("server_id", [server.server_id for server in servers], place)
    for server in servers:
        _refuse_twice("device_id", [one.device_id for one in server.device], f"{place}, {server.server_id}")
    ranks = [rank for server in servers for rank in server.ranks]
    if ranks != list(range(len(ranks))):
        raise ConfigError(
            f"the {len(ranks)} ranks are not numbered from 0 through all hosts, in the order of the hosts "
            "(merge_hccl.py does so)",
            key="rank_id",
            place=place,
        )
    return table


def _refuse_twice(key: str, values: Sequence[Any], place: str) -> None:
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise ConfigError("occurs twice", key=key, value=value, place=place)


def this_host() -> str:
    """Return an IP address at which other hosts can probably reach this host. Raises ConfigError if no
    address is found."""
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found.append(probe.getsockname()[0])
    for address in found:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError("the address of this host was not found; give --server_ip", key="--server_ip")


def table_of_host(devices: Sequence[int], address: str) -> RankTable:
    """Build the rank table of a single host. Ranks are numbered in the order of ``devices``."""
    ranked = [
        Device(device_id=number, device_ip=address, rank_id=rank) for rank, number in enumerate(devices)
    ]
    return RankTable(server_count=1, server_list=[Server(server_id=address, device=ranked)])


def merged(tables: Sequence[RankTable]) -> RankTable:
    """Merge the rank tables of several hosts, in the order of ``tables``. Ranks are renumbered from 0."""
    servers = [server.model_copy(deep=True) for table in tables for server in table.server_list]
    _refuse_twice("server_id", [server.server_id for server in servers], "the tables")
    ranked = (device for server in servers for device in sorted(server.device, key=lambda one: one.rank_id))
    for rank, device in enumerate(ranked):
        device.rank_id = rank
    return RankTable(server_count=len(servers), server_list=servers)


def write_rank_table(path: Path, table: RankTable) -> None:
    """Write ``table`` to the file ``path``. Raises ConfigError if the file exists with other contents."""
    text = table.model_dump_json(indent=4)
    with writing(None, path):
        if not path.exists():
            with atomic_write(path, "w") as file:
                file.write(text)
        elif path.read_text("utf-8", "replace") != text:
            raise ConfigError("already exists with other contents; nothing is overwritten", place=str(path))


USAGE = "usage: bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH [a,b] RUN_MODE [RANK_SIZE]"
_RANGE = re.compile(r"[\[(]\s*(\d{1,7})\s*,\s*(\d{1,7})\s*[\])]", re.ASCII)


@dataclass(frozen=True)
class Launch:
    """The processes to start on this host.

    Attributes:
        launcher: arguments of ``paddle.distributed.launch``.
        program: arguments of ``run_mindformer.py``.
        world_size: the number of ranks on all hosts.
        says: a line to print, with the ranks and the directory of their logs.
    """

    launcher: tuple[str, ...]
    program: tuple[str, ...]
    world_size: int
    says: str


def launch_of(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Return the processes to start on this host for the arguments of ``run_distribute.sh``."""
    if len(argv) not in (4, 5):
        raise ConfigError(f"takes four or five arguments, not {len(argv)}. {USAGE}", key="run_distribute.sh")
    config, mode = Path(os.path.abspath(argv[1])), argv[3]  # noqa: PTH100 - resolves `..` but not links
    table = read_rank_table(Path(argv[0]))
    if not config.is_file():
        raise ConfigError("there is no such file", key="CONFIG_PATH", value=str(argv[1]))
    if mode not in RUN_MODES:
        raise ConfigError(f"must be one of {', '.join(RUN_MODES)}", key="RUN_MODE", value=mode)
    first, end = device_range(argv[2])
    _check_size(argv[4] if len(argv) == 5 else None, table, end - first)
    node, server = _server_of(table, range(first, end), argv[2])
    log_dir = f"mf_parallel_{first}_{end}/{time.strftime('%Y%m%d-%H%M%S')}"
    arguments = [*_ranks(server, table, first, end), "--log_dir", log_dir]
    several = len(table.server_list) > 1
    if several:
        master = f"{table.server_list[0].server_id}:{environ.get('MASTER_PORT', '6379')}"
        arguments += ["--nnodes", str(len(table.server_list)), "--rank", str(node), "--master", master]
        arguments += ["--host", server.server_id]
    world_size = table.num_ranks if several else end - first
    return Launch(
        tuple(arguments),
        (f"--config={config}", "--use_parallel=True", f"--run_mode={mode}"),
        world_size,
        f"ranks {first} to {end - 1} of {counted(world_size, 'rank')}, logs in {log_dir}",
    )


def device_range(text: str) -> tuple[int, int]:
    """Parse a range of devices, ``[a,b]`` or ``[a,b)``, and return (a, b). Both forms exclude device b:
    ``[0,8]`` is devices 0 to 7."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ConfigError("must be a range such as [0,8], which is 0 to 7", key="DEVICE_RANGE", value=text)
    first, end = int(found[1]), int(found[2])
    if first >= end:
        raise ConfigError("is empty: the second number is not included", key="DEVICE_RANGE", value=text)
    return first, end


def _check_size(text: str | None, table: RankTable, width: int) -> None:
    sizes = {str(table.num_ranks), str(width)} if len(table.server_list) == 1 else {str(table.num_ranks)}
    if text is not None and text not in sizes:
        raise ConfigError(
            f"the rank table has {counted(table.num_ranks, 'rank')}", key="RANK_SIZE", value=text
        )


def _server_of(table: RankTable, numbers: range, text: str) -> tuple[int, Server]:
    """Return the host that the user's range ``numbers`` describes, as (index in the rank table, host). With
    several hosts, the range must consist of exactly the ranks of one host. With one host, the range consists
    of device numbers, which the host must have. ``text`` is the range as the user wrote it, for error
    messages."""
    servers = table.server_list
    if len(servers) == 1:
        known = {device.device_id for device in servers[0].device}
        if strangers := sorted({*numbers} - known):
            raise ConfigError(
                f"the rank table has no device {strangers[0]}, but {', '.join(map(str, sorted(known)))}",
                key="DEVICE_RANGE",
                value=text,
            )
        return 0, servers[0]
    if len({len(server.device) for server in servers}) > 1:
        words = ", ".join(f"{server.server_id} {len(server.device)}" for server in servers)
        raise ConfigError(f"all hosts must have the same number of devices; they have: {words}", key="device")
    for number, server in enumerate(servers):
        if server.ranks == list(numbers):
            return number, server
    hosts = ", ".join(f"[{one.ranks[0]},{one.ranks[-1] + 1}] is {one.server_id}" for one in servers)
    raise ConfigError(f"must be the ranks of one host: {hosts}", key="DEVICE_RANGE", value=text)


def _ranks(server: Server, table: RankTable, first: int, end: int) -> list[str]:
    if expected_device("auto") == "cpu":
        return ["--nproc_per_node", str(end - first)]
    devices = sorted(server.device, key=lambda one: one.rank_id)
    numbers = [one.device_id for one in devices] if len(table.server_list) > 1 else range(first, end)
    return ["--devices", ",".join(map(str, numbers))]
