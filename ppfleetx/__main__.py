"""``python -m ppfleetx``: the command ``ppfleetx``."""

import sys


def main() -> None:
    """The console script."""
    try:
        from ppfleetx.cli.main import main as run
    except KeyboardInterrupt:  # what comes later is said by the command itself
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
