"""The function ``pipeline`` at the import path that it has in MindFormers, with ``ppfleetx`` in place of
``mindformers``: ``from ppfleetx.pipeline import pipeline``.
"""

from ppfleetx.api.mindformers_pipeline import TextGenerationPipeline, pipeline

__all__ = ["TextGenerationPipeline", "pipeline"]
