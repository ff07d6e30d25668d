"""MindFormers' function ``pipeline`` under MindFormers' import path: ``from ppfleetx.pipeline import
pipeline``.
"""

from ppfleetx.api.mindformers_pipeline import TextGenerationPipeline, pipeline

__all__ = ["TextGenerationPipeline", "pipeline"]
