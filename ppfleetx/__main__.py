"""``python -m ppfleetx``: the command ``ppfleetx``. It is also the script of each rank of ``--nproc``,
because Paddle's launcher takes the path of a script, not a module.
"""

import sys


def main() -> None:
    """The console script."""
    try:
        from ppfleetx.commands.main import main as run
    except KeyboardInterrupt:  # the command itself reports later errors
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


def main_of_rank() -> None:
    """Run :func:`main` in a process that was started with this file's path."""
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package whose command started the ranks
    from ppfleetx.commands.launching import mark_errors

    mark_errors()
    main()


if __name__ == "__main__":
    main() if __package__ else main_of_rank()
