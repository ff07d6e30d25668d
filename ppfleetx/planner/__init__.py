from importlib import resources
from typing import Any

ANY_CARD = "A100-80GB"
"""The card of plans whose configuration names none."""


def shipped_cards() -> dict[str, Any]:
    import yaml

    return yaml.safe_load((resources.files(__package__) / "cards.yaml").read_text("utf-8"))
