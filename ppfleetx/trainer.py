"""MindFormers' trainer at the import path that it has in MindFormers, with ``ppfleetx`` in place of
``mindformers``: ``from ppfleetx.trainer import Trainer``. New programs should use ``ppfleetx.Trainer``.
"""

from ppfleetx.api.mindformers_pipeline import Trainer

__all__ = ["Trainer"]
