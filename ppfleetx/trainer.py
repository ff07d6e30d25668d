"""``from ppfleetx.trainer import Trainer``: MindFormers' trainer. ``ppfleetx.Trainer`` is our own."""

from ppfleetx.api.text_generation import Trainer

__all__ = ["Trainer"]
