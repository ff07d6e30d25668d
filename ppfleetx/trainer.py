"""MindFormers' trainer under MindFormers' import path: ``from ppfleetx.trainer import Trainer``. New programs
should use ``ppfleetx.Trainer``.
"""

from ppfleetx.api.text_generation import Trainer

__all__ = ["Trainer"]
