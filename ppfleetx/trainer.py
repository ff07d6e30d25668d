"""MindFormers' trainer under MindFormers' import path: ``from ppfleetx.trainer import Trainer``. New programs
should use ``ppfleetx.Trainer``.
"""

from ppfleetx.api.mindformers_pipeline import Trainer

__all__ = ["Trainer"]
