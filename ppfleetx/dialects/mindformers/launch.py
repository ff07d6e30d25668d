"""``run_distribute.sh``: turn a rank table and a range of devices into arguments of Paddle's launcher."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import UNSET, ConfigError
from ppfleetx.config.fields import MAX_RANKS
from ppfleetx.config.reading.parse import read_text
from ppfleetx.config.reading.tree import is_index
from ppfleetx.dialects.mindformers.arguments import RUN_MODES
from ppfleetx.utils.devices import expected_device
from ppfleetx.utils.files import atomic_write

_ELSEWHERE = ("192.0.2.1", 9)  # no host has this address (RFC 5737), and nothing is sent to it


@dataclass(frozen=True)
class Device:
    """One device: its number on its host, its address, and its rank in the job."""

    device_id: int
    device_ip: str
    rank: int


@dataclass(frozen=True)
class Server:
    """One host: its address and its devices, in the order of their ranks."""

    address: str
    devices: tuple[Device, ...]

    @property
    def ranks(self) -> range:
        """The ranks of this host, which must be consecutive."""
        return range(self.devices[0].rank, self.devices[-1].rank + 1)


@dataclass(frozen=True)
class RankTable:
    """All hosts of a job, in the order of their ranks."""

    servers: tuple[Server, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the job."""
        return sum(len(server.devices) for server in self.servers)

    def as_json(self) -> dict[str, Any]:
        """The table in the form of its file."""
        servers = [
            {
                "server_id": server.address,
                "device": [
                    {"device_id": str(d.device_id), "device_ip": d.device_ip, "rank_id": str(d.rank)}
                    for d in server.devices
                ],
                "host_nic_ip": "reserve",
            }
            for server in self.servers
        ]
        return {
            "version": "1.0",
            "server_count": str(len(servers)),
            "server_list": servers,
            "status": "completed",
        }


class _DeviceRow(BaseModel):
    device_id: Annotated[int, Field(ge=0)]
    device_ip: str = ""
    rank_id: Annotated[int, Field(ge=0, lt=MAX_RANKS)]


class _ServerRow(BaseModel):
    server_id: Annotated[str, Field(min_length=1)]
    device: Annotated[list[_DeviceRow], Field(min_length=1)]


class _TableFile(BaseModel):
    """The keys that are read from the file. Numbers in the file are texts."""

    server_count: int
    server_list: Annotated[list[_ServerRow], Field(min_length=1)]
    status: Literal["completed"] = "completed"


def read_rank_table(path: Path) -> RankTable:
    """Read a rank table and check it.

    Raises:
        ConfigError: there is no such file, it is not JSON, or counts, ranks or hosts are wrong.
    """
    text, place = read_text(path), str(path)
    try:
        content = _TableFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].replace("Input should be", "must be")
        key = ".".join(map(str, first["loc"])) or None
        value = UNSET if key is None else first["input"]
        raise ConfigError(f"is no rank table: {rule}", key=key, value=value, place=place) from None
    servers = []
    for row in content.server_list:
        devices = [Device(one.device_id, one.device_ip, one.rank_id) for one in row.device]
        servers.append(Server(row.server_id, tuple(sorted(devices, key=lambda device: device.rank))))
    table = RankTable(tuple(servers))
    if content.server_count != len(servers):
        hosts = counted(len(servers), "host")
        raise ConfigError(
            f"server_list has {hosts}", key="server_count", value=content.server_count, place=place
        )
    _check_devices(table, place)
    _check_ranks(table, place)
    return table


def _check_devices(table: RankTable, place: str) -> None:
    """Check that no host and no device occurs twice. Devices are compared by number on their host and by
    address.
    """
    _refuse_twice("server_id", [server.address for server in table.servers], place)
    for server in table.servers:
        numbers = [device.device_id for device in server.devices]
        _refuse_twice("device_id", numbers, f"{place}, {server.address}")
    own = [(server.address, device.device_ip) for server in table.servers for device in server.devices]
    _refuse_twice("device_ip", [address for host, address in own if address not in ("", host)], place)


def _refuse_twice(key: str, values: Sequence[Any], place: str, rule: str = "is there twice") -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(rule, key=key, value=twice[0], place=place)


def _check_ranks(table: RankTable, place: str) -> None:
    ranks = [device.rank for server in table.servers for device in server.devices]
    rule = "is there twice; number the ranks through all hosts (merge_hccl.py does)"
    _refuse_twice("rank_id", ranks, place, rule)
    missing = next((rank for rank, found in enumerate(sorted(ranks)) if rank != found), None)
    if missing is not None:
        raise ConfigError(
            f"rank {missing} is missing: {len(ranks)} ranks are numbered from 0", key="rank_id", place=place
        )
    if ranks != sorted(ranks):
        raise ConfigError(
            "the ranks of a host follow those of the host before it", key="rank_id", place=place
        )


def this_host() -> str:
    """The address under which other hosts reach this one, as far as can be determined.

    Raises:
        ConfigError: this host has only a loopback address.
    """
    for find in (_by_name, _by_route):
        address = find()
        if address is not None and _is_own(address):
            return address
    raise ConfigError("the address of this host was not found; give --server_ip", key="--server_ip")


def _by_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _by_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:
            return None


def _is_own(address: str) -> bool:
    """Whether an interface of this host has the address, and others may reach it there."""
    if ipaddress.ip_address(address).is_loopback:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def table_of_host(devices: Sequence[int], address: str) -> RankTable:
    """Make the table of one host with these devices, ranked in this order."""
    ranked = tuple(Device(number, address, rank) for rank, number in enumerate(devices))
    return RankTable((Server(address, ranked),))


def merged(tables: Sequence[RankTable]) -> RankTable:
    """Merge several tables into one, with hosts in the given order and ranks numbered anew.

    Raises:
        ConfigError: a host is in two tables.
    """
    servers: list[Server] = []
    rank = 0
    for server in (server for table in tables for server in table.servers):
        devices = tuple(Device(d.device_id, d.device_ip, rank + i) for i, d in enumerate(server.devices))
        rank += len(devices)
        servers.append(Server(server.address, devices))
    addresses = [server.address for server in servers]
    _refuse_twice("server_id", addresses, "the tables", "is in two of the tables")
    return RankTable(tuple(servers))


def write_rank_table(path: Path, table: RankTable) -> None:
    """Write a table. If the file exists already, it must hold the same table.

    Raises:
        ConfigError: the file holds something else, or cannot be written.
    """
    text = json.dumps(table.as_json(), indent=4)
    try:
        if path.exists():
            if path.read_text("utf-8", "replace") == text:
                return
            raise ConfigError(
                "is there already and holds something else; nothing is overwritten", place=str(path)
            )
        with atomic_write(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", place=str(path)) from error


USAGE = "usage: bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH [a,b] RUN_MODE [RANK_SIZE]"
PORT_VARIABLE, _PORT = "MASTER_PORT", 6379
_RANGE = re.compile(r"[\[(]\s*(\d{1,7})\s*,\s*(\d{1,7})\s*[\])]", re.ASCII)


@dataclass(frozen=True)
class Launch:
    """The processes to start on this host.

    Attributes:
        launcher: the arguments of ``paddle.distributed.launch``.
        program: the arguments of ``run_mindformer.py``.
        world_size: the number of ranks of the job, on all hosts.
        says: a line for the user.
    """

    launcher: tuple[str, ...]
    program: tuple[str, ...]
    world_size: int
    says: str


def launch_of(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """Read the four or five arguments of the script.

    Raises:
        ConfigError: there are more or fewer arguments, a table or a file cannot be read, or the ranks do not
            belong to one host.
    """
    if len(argv) not in (4, 5):
        raise ConfigError(f"takes four or five arguments, not {len(argv)}. {USAGE}", key="run_distribute.sh")
    path, config, mode = Path(argv[0]), _absolute(argv[1]), argv[3]
    table = read_rank_table(path)
    if not config.is_file():
        raise ConfigError("there is no such file", key="CONFIG_PATH", value=str(argv[1]))
    if mode not in RUN_MODES:
        raise ConfigError(f"must be one of {', '.join(RUN_MODES)}", key="RUN_MODE", value=mode)
    first, end = device_range(argv[2])
    _check_size(argv[4] if len(argv) == 5 else None, table, end - first)
    node, server = _server_of(table, range(first, end), argv[2])
    log_dir = f"mf_parallel_{first}_{end}/{time.strftime('%Y%m%d-%H%M%S')}"
    arguments = [*_ranks(server, table, first, end), "--log_dir", log_dir]
    if len(table.servers) > 1:
        master = f"{table.servers[0].address}:{_port(environ)}"
        arguments += ["--nnodes", str(len(table.servers)), "--rank", str(node), "--master", master]
        arguments += ["--host", server.address]
    world_size = table.num_ranks if len(table.servers) > 1 else end - first
    return Launch(
        tuple(arguments),
        (f"--config={config}", "--use_parallel=True", f"--run_mode={mode}"),
        world_size,
        f"ranks {first} to {end - 1} of {counted(world_size, 'rank')}, logs in {log_dir}",
    )


def _absolute(text: str) -> Path:
    try:
        return Path(os.path.abspath(text))  # noqa: PTH100 - `..` is taken out, links are left
    except ValueError as error:  # for NUL in the name
        raise ConfigError(f"is not the name of a file: {error}", key="CONFIG_PATH", value=text) from None


def device_range(text: str) -> tuple[int, int]:
    """Read a range of devices: ``[a,b]`` includes b, ``[a,b)`` does not.

    Raises:
        ConfigError: the text has another form, or the range is empty.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ConfigError("must be a range such as [0,8], which is 0 to 7", key="DEVICE_RANGE", value=text)
    first, end = int(found[1]), int(found[2])
    if first >= end:
        raise ConfigError(
            "holds no device: the second number is not part of it", key="DEVICE_RANGE", value=text
        )
    return first, end


def _check_size(text: str | None, table: RankTable, width: int) -> None:
    if text is None:
        return
    if not is_index(text):
        raise ConfigError("must be a number", key="RANK_SIZE", value=text)
    expected = table.num_ranks if len(table.servers) > 1 else width
    if int(text) not in (expected, table.num_ranks):
        raise ConfigError(
            f"the rank table has {counted(table.num_ranks, 'rank')}", key="RANK_SIZE", value=text
        )


def _server_of(table: RankTable, ranks: range, text: str) -> tuple[int, Server]:
    """The host with these ranks or, in a table of one host, with these devices."""
    if len(table.servers) == 1:
        server = table.servers[0]
        known = {device.device_id for device in server.devices}
        strangers = [number for number in ranks if number not in known]
        if strangers:
            raise ConfigError(
                f"the rank table has no device {strangers[0]}, but {_numbers(sorted(known))}",
                key="DEVICE_RANGE",
                value=text,
            )
        return 0, server
    sizes = {len(server.devices) for server in table.servers}
    if len(sizes) > 1:
        words = ", ".join(f"{server.address} {len(server.devices)}" for server in table.servers)
        raise ConfigError(
            f"every host needs as many devices as the others, and they have: {words}", key="device"
        )
    for number, server in enumerate(table.servers):
        if server.ranks == ranks:
            return number, server
    hosts = ", ".join(f"[{one.ranks[0]},{one.ranks[-1] + 1}] is {one.address}" for one in table.servers[:8])
    raise ConfigError(f"must be the ranks of one host: {hosts}", key="DEVICE_RANGE", value=text)


def _ranks(server: Server, table: RankTable, first: int, end: int) -> list[str]:
    """The devices by their numbers on GPUs, otherwise only their count."""
    if expected_device("auto") == "cpu":
        return ["--nproc_per_node", str(end - first)]
    numbers = [device.device_id for device in server.devices] if len(table.servers) > 1 else range(first, end)
    return ["--devices", ",".join(map(str, numbers))]


def _port(environ: Mapping[str, str]) -> int:
    text = environ.get(PORT_VARIABLE, str(_PORT))
    if not is_index(text) or not 0 < int(text) < 65536:
        raise ConfigError("must be a port, 1 to 65535", key=PORT_VARIABLE, value=text, place="environment")
    return int(text)


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
