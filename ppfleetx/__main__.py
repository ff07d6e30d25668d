"""``python -m ppfleetx``: the command ``ppfleetx``. Paddle's launcher runs this file in each rank."""

import sys


def main() -> None:
    """Run the command ``ppfleetx``. The console script calls this function."""
    try:
        from ppfleetx.commands.main import main as run
    except KeyboardInterrupt:  # the command itself reports later errors
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


def main_of_rank() -> None:
    """Run :func:`main` in a rank that Paddle's launcher started with the path of this file. Lines that the
    rank writes to standard error begin with ``[rank N]``."""
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])  # import the package that started the ranks
    from ppfleetx.commands.launching import mark_errors

    mark_errors()
    main()


if __name__ == "__main__":
    main() if __package__ else main_of_rank()  # Paddle's launcher runs a path, not a module
