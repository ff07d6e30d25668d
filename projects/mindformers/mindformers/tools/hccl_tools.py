#!/usr/bin/env python3
"""Write the rank table of this host, hccl_8p_01234567_ADDRESS.json, into the current directory."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device_num", default="[0,8)", help="devices of this host, e.g. [0,8)")
    parser.add_argument("--visible_devices", default=None, help="numbers of these devices, e.g. 4,5,6,7")
    parser.add_argument("--server_ip", default="", help="address of this host, if it is not found")
    args = parser.parse_args()
    from ppfleetx.config.errors import ConfigError
    from ppfleetx.dialects.mindformers.rank_table import (
        device_range,
        table_of_host,
        this_host,
        write_rank_table,
    )

    first, end = device_range(args.device_num)
    visible = (args.visible_devices or ",".join(map(str, range(end)))).split(",")
    if len(visible) < end or not all(word.strip().isdigit() for word in visible):
        raise ConfigError(
            f"must be {end} numbers or more", key="--visible_devices", value=args.visible_devices
        )
    address = args.server_ip or this_host()
    table = table_of_host([int(word) for word in visible[first:end]], address)
    path = Path(f"hccl_{end - first}p_{''.join(map(str, range(first, end)))}_{address}.json")
    write_rank_table(path, table)
    print(f"rank table of {end - first} devices of {address}: {path}")


if __name__ == "__main__":
    run_tool(main)
