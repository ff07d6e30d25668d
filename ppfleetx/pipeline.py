"""``from ppfleetx.pipeline import pipeline``: MindFormers' spelling."""

from ppfleetx.api.text_generation import TextGenerationPipeline, pipeline

__all__ = ["TextGenerationPipeline", "pipeline"]
