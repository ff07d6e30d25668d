#!/usr/bin/env python3
"""Make one rank table of those of several hosts, hccl_2s_16p.json, in the current directory."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file_list", nargs="+", help="tables in the order of the hosts' ranks")
    args = parser.parse_args()
    from ppfleetx.dialects.mindformers.rank_table import merged, read_rank_table, write_rank_table

    table = merged([read_rank_table(Path(name)) for name in args.file_list])
    path = Path(f"hccl_{len(table.server_list)}s_{table.num_ranks}p.json")
    write_rank_table(path, table)
    print(f"rank table of {table.num_ranks} devices on {len(table.server_list)} hosts: {path}")


if __name__ == "__main__":
    run_tool(main)
