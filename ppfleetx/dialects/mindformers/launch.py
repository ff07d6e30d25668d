"""``run_distribute.sh``: a rank table and a range of devices become the arguments of Paddle's launcher."""

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
from typing import Any

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.fields import MAX_RANKS
from ppfleetx.config.reading.parse import read_text
from ppfleetx.config.reading.tree import is_index
from ppfleetx.dialects.mindformers.arguments import RUN_MODES
from ppfleetx.utils.devices import expected_device
from ppfleetx.utils.files import atomic_write

_ELSEWHERE = ("192.0.2.1", 9)  # an address that no host has (RFC 5737); nothing is sent to it


@dataclass(frozen=True)
class Device:
    """One device: its number on its host, its address, its rank in the job."""

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
        """The ranks of this host, which follow each other."""
        return range(self.devices[0].rank, self.devices[-1].rank + 1)


@dataclass(frozen=True)
class RankTable:
    """All hosts of a job, in the order of their ranks."""

    servers: tuple[Server, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return sum(len(server.devices) for server in self.servers)

    def as_json(self) -> dict[str, Any]:
        """The table as its file holds it."""
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


def read_rank_table(path: Path) -> RankTable:
    """Read a rank table and check it.

    Raises:
        ConfigError: there is no such file, it is not JSON, or counts, ranks or hosts are wrong.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no rank table, which is JSON: {error}", place=str(path)) from None
    place = str(path)
    table = RankTable(
        tuple(_server(one, place, number) for number, one in enumerate(_list(content, "server_list", place)))
    )
    _check_count(content, table, place)
    _check_devices(table, place)
    _check_ranks(table, place)
    return table


def _list(content: Any, key: str, place: str) -> list[Any]:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not found:
        raise ConfigError("is needed: a list with one entry at least", key=key, place=place)
    if len(found) > MAX_RANKS:
        raise ConfigError(
            f"has {len(found):,} entries; a job has at most {MAX_RANKS:,} ranks", key=key, place=place
        )
    return found


def _server(content: Any, place: str, number: int) -> Server:
    key = f"server_list.{number}"
    address = content.get("server_id") if isinstance(content, dict) else None
    if not isinstance(address, str) or not address.strip() or not address.isprintable():
        raise ConfigError("is needed: the host's address", key=f"{key}.server_id", place=place)
    devices = [
        _device(one, place, f"{key}.device.{index}")
        for index, one in enumerate(_list(content, "device", f"{place}, {key}"))
    ]
    return Server(address.strip(), tuple(sorted(devices, key=lambda device: device.rank)))


def _device(content: Any, place: str, key: str) -> Device:
    if not isinstance(content, dict):
        raise ConfigError("must hold device_id, device_ip and rank_id", key=key, place=place)
    numbers = {}
    for name in ("device_id", "rank_id"):
        text = str(content.get(name, "")) if not isinstance(content.get(name), bool) else ""
        if not is_index(text):
            raise ConfigError("must be a number", key=f"{key}.{name}", value=content.get(name), place=place)
        numbers[name] = int(text)
    return Device(numbers["device_id"], str(content.get("device_ip", "")), numbers["rank_id"])


def _check_count(content: dict[str, Any], table: RankTable, place: str) -> None:
    count = content.get("server_count")
    if str(count) != str(len(table.servers)):
        raise ConfigError(
            f"server_list has {counted(len(table.servers), 'host')}",
            key="server_count",
            value=count,
            place=place,
        )
    status = content.get("status", "completed")
    if status != "completed":
        raise ConfigError("must be 'completed'", key="status", value=status, place=place)
    twice = [name for name, n in Counter(server.address for server in table.servers).items() if n > 1]
    if twice:
        raise ConfigError("a host is there twice", key="server_id", value=twice[0], place=place)


def _check_devices(table: RankTable, place: str) -> None:
    """Check that no device is there twice: by its number on its host, and by its own address."""
    for server in table.servers:
        _refuse_twice(
            "device_id", [device.device_id for device in server.devices], f"{place}, {server.address}"
        )
    own = [(server.address, device.device_ip) for server in table.servers for device in server.devices]
    _refuse_twice("device_ip", [address for host, address in own if address not in ("", host)], place)


def _refuse_twice(key: str, values: Sequence[Any], place: str) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError("a device is there twice", key=key, value=twice[0], place=place)


def _check_ranks(table: RankTable, place: str) -> None:
    ranks = [device.rank for server in table.servers for device in server.devices]
    twice = sorted(rank for rank, n in Counter(ranks).items() if n > 1)
    if twice:
        raise ConfigError(
            "is there twice; number the ranks through all hosts (merge_hccl.py does)",
            key="rank_id",
            value=twice[0],
            place=place,
        )
    ordered = sorted(ranks)
    missing = next((wanted for wanted, rank in enumerate(ordered) if rank != wanted), None)
    if missing is not None:
        raise ConfigError(
            f"rank {missing} is missing: {len(ranks)} ranks are numbered from 0", key="rank_id", place=place
        )
    if ranks != ordered:
        raise ConfigError(
            "the ranks of a host follow those of the host before it", key="rank_id", place=place
        )


def this_host() -> str:
    """The address under which other hosts reach this one, as far as can be determined.

    Raises:
        ConfigError: it has only a loopback address.
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
    """Whether an interface has the address, and others may reach it there."""
    if ipaddress.ip_address(address).is_loopback:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def table_of_host(devices: Sequence[int], address: str) -> RankTable:
    """The table of one host with these devices, ranked in this order."""
    ranked = tuple(Device(number, address, rank) for rank, number in enumerate(devices))
    return RankTable((Server(address, ranked),))


def merged(tables: Sequence[RankTable]) -> RankTable:
    """One table of several, hosts in the given order and ranks numbered again.

    Raises:
        ConfigError: a host is in two of them.
    """
    servers: list[Server] = []
    rank = 0
    for server in (server for table in tables for server in table.servers):
        devices = tuple(Device(d.device_id, d.device_ip, rank + i) for i, d in enumerate(server.devices))
        rank += len(devices)
        servers.append(Server(server.address, devices))
    twice = [name for name, n in Counter(server.address for server in servers).items() if n > 1]
    if twice:
        raise ConfigError("is in two of the tables", key="server_id", value=twice[0])
    return RankTable(tuple(servers))


def write_rank_table(path: Path, table: RankTable) -> None:
    """Write a table; a file that is there already must hold the same.

    Raises:
        ConfigError: there is something else, or it cannot be written.
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
        launcher: arguments of ``paddle.distributed.launch``.
        program: arguments of ``run_mindformer.py``.
        world_size: ranks of the job, on all hosts.
        says: a line for the user.
    """

    launcher: tuple[str, ...]
    program: tuple[str, ...]
    world_size: int
    says: str


def launch_of(argv: Sequence[str], environ: Mapping[str, str]) -> Launch:
    """The four or five arguments of the script.

    Raises:
        ConfigError: another number of them, a table or a file that cannot be read, or ranks that are not one
            host's.
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
    except ValueError as error:  # NUL in the name
        raise ConfigError(f"is not the name of a file: {error}", key="CONFIG_PATH", value=text) from None


def device_range(text: str) -> tuple[int, int]:
    """``[a,b]``, or as in mathematics ``[a,b)``: a to b - 1.

    Raises:
        ConfigError: it has another form, or holds nothing.
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
    """The host with these ranks; in a table of one host, with these devices."""
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
    """Devices by their numbers on GPUs, else how many there are."""
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
