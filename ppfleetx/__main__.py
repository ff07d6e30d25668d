"""``python -m ppfleetx``: the command ``ppfleetx``."""

from ppfleetx.cli.main import main

if __name__ == "__main__":
    main()
