from pathlib import Path
from typing import Any

ANY_CARD = "A100-80GB"
"""The accelerator card that is assumed if neither the configuration nor the command line names one."""


def shipped_cards() -> dict[str, Any]:
    from ppfleetx.config.reading.parse import shipped_yaml

    return shipped_yaml(Path(__file__).with_name("cards.yaml"))
