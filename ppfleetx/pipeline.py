"""``from ppfleetx.pipeline import pipeline``: the same import path as in MindFormers."""

from ppfleetx.api.text_generation import TextGenerationPipeline, pipeline

__all__ = ["TextGenerationPipeline", "pipeline"]
