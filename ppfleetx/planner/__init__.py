from importlib import resources


def card_names() -> list[str]:
    """Names of the shipped cards."""
    import yaml

    return list(yaml.safe_load((resources.files(__package__) / "cards.yaml").read_text("utf-8")))
