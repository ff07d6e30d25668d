from importlib import resources

ANY_CARD = "A100-80GB"
"""The card of plans whose configuration names none."""


def card_names() -> list[str]:
    """The names of the shipped cards."""
    import yaml

    return list(yaml.safe_load((resources.files(__package__) / "cards.yaml").read_text("utf-8")))
