"""``python -m ppfleetx.nn.cpu_ops``: compile the operators for this machine."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from ppfleetx.config.errors import UserError
from ppfleetx.nn.cpu_ops.compiled import LIBRARIES
from ppfleetx.utils.exit_codes import run_tool
from ppfleetx.utils.process_env import import_paddle


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ppfleetx.nn.cpu_ops",
        description="Compile the operators that make decoding and bfloat16 training faster on this CPU.",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="if they cannot be compiled, say so and exit with code 0"
    )
    args = parser.parse_args()
    import_paddle()
    from ppfleetx.nn.cpu_ops.build import build

    try:
        with ThreadPoolExecutor() as pool:  # each thread runs a compiler
            for purpose, path in zip(LIBRARIES.values(), pool.map(build, LIBRARIES), strict=True):
                print(f"{purpose}: {path or 'none, because the processor or Paddle lacks support'}")
    except UserError as error:
        if not args.if_possible:
            raise
        print(f"no operators for this CPU, so decoding and training are slower: {error}")


if __name__ == "__main__":
    run_tool(main)
