"""Build a model from its configuration with ``build_module(cfg)``, as PaddleFleetX's programs do.

The model has no weights until they are set::

    module = build_module(cfg)
    module.model.eval()
    module.model.set_state_dict(weights)
    print(module.generate("Once upon a time")[0])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.api.model import GPT, ready
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.rules import check_one_process
from ppfleetx.data.build import load_tokenizer
from ppfleetx.generation.text_io import as_texts

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.models.staged_model import StagedModel


class GenerationModule:
    """A language model built without weights, as in PaddleFleetX. First call ``model.set_state_dict`` with
    weights under FleetX's or ppfleetx's names, then :meth:`generate`.
    """

    def __init__(self, cfg: RunConfig, network: StagedModel) -> None:
        self.cfg, self.model = cfg, network
        self._has_weights = False
        network.set_state_dict = self._set_state_dict  # type: ignore[method-assign]

    def generate(self, text: str | Sequence[str], **options: Any) -> list[str]:
        """Generate continuations of prompts. Returns a list of strings, each a prompt followed by its
        continuation. With ``num_return_sequences`` above 1, the list has that many strings for each prompt.

        Args:
            text: a prompt or a list of prompts.
            options: keys of the section ``Generation`` that replace the configured values, e.g.
                ``max_dec_len=50, temperature=0.8``.

        Raises:
            ConfigError: the model has no weights or no tokenizer, or an option is unknown or has a wrong
                value.
            DataError: ``text`` is not a string or a list of strings.
        """
        if not self._has_weights:
            raise ConfigError("the model has no weights yet; give them to module.model.set_state_dict")
        prompts = as_texts(text)
        found = GPT(self.cfg, self.model, load_tokenizer(self.cfg)).generate(prompts, **options)
        each = [one if isinstance(one, list) else [one] for one in found]
        return [
            prompt + generation.text
            for prompt, generations in zip(prompts, each, strict=True)
            for generation in generations
        ]

    def _set_state_dict(
        self, weights: Mapping[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Set all parameters of the network. This method replaces the network's ``set_state_dict``.

        Returns two empty lists (missing and unknown parameters), as Paddle's method does if it succeeds.

        Raises:
            CheckpointError: a parameter is missing or unknown, or has a wrong shape.
            ConfigError: ``use_structured_name`` is False.
        """
        if not use_structured_name:
            raise ConfigError(
                "weights are set by the names of their layers", key="use_structured_name", value=False
            )
        import paddle

        from ppfleetx.conversion.fleetx import canonical_name

        own = {parameter.info.name: parameter for parameter in self.model.parameters()}
        given: dict[str, np.ndarray] = {}
        for name, value in weights.items():
            ours = None if name in own else canonical_name(name)
            given[ours or name] = np.asarray(value)
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        if missing or unknown:
            parts = [
                f"{words[0]} is {what}"
                for what, words in (("missing", missing), ("unknown", unknown))
                if words
            ]
            raise CheckpointError(f"the weights are not those of the model: {' and '.join(parts)}")
        for name, parameter in own.items():
            value = _padded(name, given[name], list(parameter.shape), self.cfg.Model.vocab_size)
            parameter.set_value(paddle.to_tensor(value.astype("float32")).astype(parameter.dtype))
        self._has_weights = True
        return [], []


def _padded(name: str, value: np.ndarray, shape: list[int], vocab_size: int) -> np.ndarray:
    """Return the weight ``value`` in the shape ``shape``. The padding rows of a word-embedding table are
    added or removed as needed. Raises CheckpointError for any other difference in shape."""
    if list(value.shape) == shape:
        return value
    is_table = name.endswith("word_embeddings.weight") and value.ndim == 2 and value.shape[1] == shape[1]
    if is_table and value.shape[0] >= vocab_size:
        wide = np.zeros(shape, value.dtype)
        wide[:vocab_size] = value[:vocab_size]
        return wide
    raise CheckpointError(f"{name} has the shape {list(value.shape)}, the model's is {shape}")


def build_module(cfg: RunConfig) -> GenerationModule:
    """Build the network of ``cfg`` (from ``ppfleetx.load_config``) in this process, without weights.

    Raises:
        ConfigError: the network cannot run on this machine, needs several processes, or is not a language
            model.
    """
    if cfg.Model.task.classifies:
        raise cfg.error("Model.module", "a classifier has no next token")
    check_one_process(cfg, "a module built in Python")
    ctx = ready(cfg)
    from ppfleetx.commands.train import build_runner

    return GenerationModule(cfg, build_runner(cfg, ctx, train=False).model)
