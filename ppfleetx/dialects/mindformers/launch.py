"""``run_distribute.sh``: a rank table and a range of devices become the arguments of Paddle's launcher."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.tree import is_index
from ppfleetx.dialects.mindformers.arguments import RUN_MODES
from ppfleetx.dialects.mindformers.rank_table import RankTable, Server, read_rank_table
from ppfleetx.utils.devices import expected_device

USAGE = "usage: bash run_distribute.sh RANK_TABLE_FILE CONFIG_PATH [a,b] RUN_MODE [RANK_SIZE]"
PORT_VARIABLE, _PORT = "MASTER_PORT", 6379
_RANGE = re.compile(r"[\[(]\s*(\d{1,7})\s*,\s*(\d{1,7})\s*[\])]", re.ASCII)


@dataclass(frozen=True)
class Launch:
    """What is started on this host.

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
    """The host whose ranks these are; of a table of one host, any of its devices."""
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
