"""``pipeline`` and ``Trainer`` with MindFormers' interface, for the task ``text_generation``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppfleetx.api.config_arguments import Configuration, Overrides, settings_of
from ppfleetx.api.mindformers_gpt2 import GPT2LMHeadModel, GPT2Tokenizer
from ppfleetx.api.model import GPT
from ppfleetx.api.trainer import Trainer as NativeTrainer
from ppfleetx.commands.finetune_defaults import finetuning_defaults
from ppfleetx.commands.resolve_model import ResolvedModel, resolve_model
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.reading.overrides import Override, Setting, overridden_keys
from ppfleetx.config.sections.generation import READ_BY
from ppfleetx.config.shipped import shipped_configs
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.generation.text_io import as_texts
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.core.engine.callbacks.base import Callback

TASK = "text_generation"
RESULT = f"{TASK}_text"
# Options that have the same name in MindFormers.
_OPTIONS = ("top_k", "top_p", "temperature", "eos_token_id", "repetition_penalty", "seed")
_MODEL_LIKE = str | Path | GPT | GPT2LMHeadModel


class TextGenerationPipeline:
    """A callable that generates continuations of prompts, as in MindFormers. Create one with
    :func:`pipeline`. ``options`` are the default options of every call.
    """

    def __init__(self, model: GPT, options: dict[str, Any]) -> None:
        self.model, self._defaults = model, options

    def __call__(self, inputs: str | Sequence[str], **options: Any) -> list[dict[str, list[str]]]:
        """Generate a continuation of each prompt. Returns ``[{"text_generation_text": [string]}]``, with one
        dict per prompt. The string is the prompt followed by its continuation.

        Args:
            inputs: a prompt or a list of prompts.
            options: ``max_length`` (tokens of prompt and continuation together), ``do_sample`` (False: greedy
                search), ``top_k``, ``top_p``, ``temperature``, ``repetition_penalty``, ``eos_token_id``,
                ``seed``.

        Raises:
            ConfigError: an option is unknown.
            DataError: a prompt is not a string, or already has ``max_length`` tokens.
        """
        prompts = as_texts(inputs)
        chosen = self._without_ignored(checked({**self._defaults, **options}))
        return [{RESULT: [prompt + self._continued(prompt, chosen)]} for prompt in prompts]

    def _without_ignored(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Return the options ``chosen`` without those that have no effect: with ``do_sample=False``, the
        options for sampling, such as ``top_k``. A warning names the options left out.

        Raises:
            ConfigError: options for sampling are given without ``do_sample=True`` or ``False``, and the model
                does not sample by default.
        """
        samples, strategy = chosen.get("do_sample"), self.model.generation.decode_strategy
        idle = [name for name in READ_BY["sampling"] if name != "seed" and chosen.get(name) is not None]
        if not idle or samples or (samples is None and strategy == "sampling"):
            return chosen
        if samples is None:
            raise ConfigError(
                f"only sampling reads it, and this model's strategy is {strategy}: give do_sample=True too",
                key=idle[0],
                value=chosen[idle[0]],
            )
        get_logger().warning(f"{', '.join(idle)}: no effect, because do_sample is False")
        return {name: value for name, value in chosen.items() if name not in idle}

    def _continued(self, prompt: str, chosen: dict[str, Any]) -> str:
        given = {name: chosen[name] for name in _OPTIONS if chosen.get(name) is not None}
        if chosen.get("do_sample") is not None:
            given["decode_strategy"] = "sampling" if chosen["do_sample"] else "greedy_search"
        if chosen.get("max_length") is not None:
            length = len(self.model.generator.tokenizer.encode_prompt(prompt))
            if length >= chosen["max_length"]:
                raise DataError(
                    f"the prompt has {length} tokens: nothing is left of max_length {chosen['max_length']}"
                )
            given["max_dec_len"] = chosen["max_length"] - length
            given["min_dec_len"] = min(self.model.generation.min_dec_len, given["max_dec_len"])
        return self.model.generate(prompt, **given).text


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` unchanged. Raises ConfigError if the pipeline does not know an option."""
    known = (*_OPTIONS, "do_sample", "max_length")
    for name in options:
        if name not in known:
            raise ConfigError(f"the pipeline has no such option; it has {', '.join(known)}", key=name)
    return options


def pipeline(
    task: str,
    model: _MODEL_LIKE,
    tokenizer: GPT2Tokenizer | Tokenizer | str | Path | None = None,
    **options: Any,
) -> TextGenerationPipeline:
    """Create a callable that generates continuations of prompts with a model.

    Args:
        task: must be ``text_generation``.
        model: the directory of a model, or a loaded model.
        tokenizer: the tokenizer to use instead of the model's own.
        options: default options of every call; see :meth:`TextGenerationPipeline.__call__`.

    Raises:
        ConfigError: ``task`` is not ``text_generation``, or an option is unknown.
        UserError: there is no model in the directory.
    """
    check_task(task)
    checked(options)
    found = _model(model)
    if tokenizer is not None:
        found = found.with_tokenizer(_tokenizer(tokenizer))
    return TextGenerationPipeline(found, options)


def check_task(task: str) -> None:
    """Raise ConfigError if the task is not ``text_generation``."""
    if task.replace("-", "_") != TASK:
        raise ConfigError(f"the only task here is {TASK}", key="task", value=task)


def _model(model: _MODEL_LIKE) -> GPT:
    if isinstance(model, GPT2LMHeadModel):
        return model.model
    return model if isinstance(model, GPT) else GPT.from_pretrained(model)


def _tokenizer(tokenizer: GPT2Tokenizer | Tokenizer | str | Path) -> Tokenizer:
    if isinstance(tokenizer, GPT2Tokenizer):
        return tokenizer.tokenizer
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)


class Trainer:
    """MindFormers' ``Trainer`` for the task ``text_generation``. It trains with :class:`ppfleetx.Trainer`.

    Args:
        task: must be ``text_generation``.
        model: a directory with the initial weights, or the name of a shipped configuration, as listed by
            ``ppfleetx configs``. With a configuration, training starts from random weights.
        train_dataset, eval_dataset: the data, as for ``train_data`` and ``eval_data`` of
            :class:`ppfleetx.Trainer`.
        tokenizer: encodes the training and evaluation data; None: the model's tokenizer.
        args: overrides of the configuration: a mapping, or strings ``Section.key=value``.
        callbacks: as for :class:`ppfleetx.Trainer`.
        output_dir: directory of the run.

    Raises:
        ConfigError: ``task`` is not ``text_generation``, or ``model`` is neither a directory nor a
            configuration.
    """

    def __init__(
        self,
        task: str = TASK,
        model: str | Path | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: GPT2Tokenizer | Tokenizer | str | Path | None = None,
        *,
        args: Overrides | None = None,
        callbacks: Sequence[Callback] = (),
        output_dir: str | Path = "./output",
    ) -> None:
        check_task(task)
        if model is None:
            raise ConfigError(
                "give a model: a directory, or a name that `ppfleetx configs` lists", key="model"
            )
        self._place = model
        self._data = {"train_data": train_dataset, "eval_data": eval_dataset}
        self._tokenizer = None if tokenizer is None else _tokenizer(tokenizer)
        self._args, self._callbacks, self._output_dir = settings_of(args), list(callbacks), output_dir
        self._trainer: NativeTrainer | None = None
        self._scratch = ExitStack()
        weakref.finalize(self, self._scratch.close)
        self._places: dict[str, ResolvedModel] = {}
        if not Path(model).exists() and str(model) not in shipped_configs():
            raise ConfigError(
                f"there is no directory {model}, and no shipped configuration of this name", key="model"
            )

    def train(self, *, resume: bool = False) -> None:
        """Train from the weights in the directory ``model``, or from random weights if ``model`` names a
        configuration.

        Args:
            resume: continue the run in ``output_dir`` from its last checkpoint instead.

        Raises:
            UserError: there is no data, or the training run failed.
        """
        self._fit(self._args, resume=resume)

    def _fit(self, overrides: list[Override], *, resume: bool) -> None:
        if self._data["train_data"] is None:
            raise ConfigError("training needs train_dataset", key="train_dataset")
        more = [Setting("Engine.save_load.resume", True, "resume")] if resume else []
        self._trainer = self._native([*overrides, *more]).fit()

    def finetune(
        self,
        finetune_checkpoint: str | Path | None = None,
        *,
        auto_trans_ckpt: bool | None = None,
        resume: bool = False,
    ) -> None:
        """Start a new run from the weights of a checkpoint, at step 0 and with a new optimizer. If ``model``
        is a directory, the default settings, such as the learning rate, are those of ``ppfleetx finetune``.

        Args:
            finetune_checkpoint: the directory of the checkpoint; None: the directory given as ``model``.
            auto_trans_ckpt: None or True has no effect; False raises ConfigError, because checkpoints are
                always resharded for the parallel plan.
            resume: continue the run in ``output_dir`` from its last checkpoint instead.

        Raises:
            UserError: there is no data or no checkpoint, or the training run failed.
        """
        if auto_trans_ckpt is False:
            raise ConfigError(
                "a checkpoint is always split as the plan needs it; leave the option out",
                key="auto_trans_ckpt",
                value=False,
            )
        place = finetune_checkpoint or (self._place if Path(self._place).exists() else None)
        if not isinstance(place, str | Path):
            raise ConfigError("give the directory of a checkpoint", key="finetune_checkpoint", value=place)
        checkpoint = self._found(place).checkpoint
        more = [*self._args, Setting("Engine.save_load.init_from", checkpoint, "finetune_checkpoint")]
        if Path(self._place).exists():
            more += finetuning_defaults(self._found(self._place).config, more)
        self._fit(more, resume=resume)

    def evaluate(self, eval_checkpoint: str | Path | None = None) -> dict[str, float]:
        """Evaluate on ``eval_dataset``. If there is none, the evaluation uses the share of ``train_dataset``
        that the configuration holds out. Returns a dict with ``loss`` and ``ppl`` of the first evaluation
        set.

        Args:
            eval_checkpoint: the directory of the model to evaluate; None: the model trained by this object,
                or else the directory given as ``model``.
        """
        place = eval_checkpoint or (None if self._trainer is not None else self._place)
        overrides = [*self._args]
        if place is not None:
            overrides.append(Setting("Engine.save_load.ckpt_dir", self._found(place).checkpoint, "model"))
        record = self._native(overrides, starts=False).evaluate()
        record = next(iter(record.values())) if isinstance(record, dict) else record
        return {"loss": record.loss, "ppl": record.ppl}

    def predict(
        self,
        predict_checkpoint: str | Path | None = None,
        input_data: str | Sequence[str] | None = None,
        **options: Any,
    ) -> list[dict[str, list[str]]]:
        """Generate a continuation of each prompt. Returns ``[{"text_generation_text": [string]}]``, with one
        dict per prompt. The string is the prompt followed by its continuation.

        Args:
            predict_checkpoint: the directory of a checkpoint; None: the model trained by this object, or else
                the directory given as ``model``.
            input_data: a prompt, a list of prompts, or a file with one prompt per line.
            options: generation options, such as ``max_length`` and ``top_k``.
                :meth:`TextGenerationPipeline.__call__` lists them.
        """
        if input_data is None:
            raise ConfigError("give input_data: a prompt, a list of them or a file", key="input_data")
        if isinstance(input_data, str) and os.path.isfile(input_data):  # noqa: PTH113 - raises for no text
            input_data = [line for line in Path(input_data).read_text("utf-8").splitlines() if line.strip()]
        if predict_checkpoint is None and self._trainer is not None:
            model: _MODEL_LIKE = self._trainer.model
        else:
            model = predict_checkpoint or self._place
        return pipeline(TASK, model, self._tokenizer)(input_data, **options)

    def _native(self, overrides: list[Override], *, starts: bool = True) -> NativeTrainer:
        config: Configuration = str(self._place)
        tokenizer = self._tokenizer
        if Path(self._place).exists():
            found, key = self._found(self._place), "Engine.save_load.init_from"
            config, tokenizer = found.config, tokenizer or found.tokenizer
            if starts and key not in overridden_keys(overrides):
                overrides = [Setting(key, found.checkpoint, "model"), *overrides]
        return NativeTrainer(
            config,
            overrides,
            tokenizer=tokenizer,
            output_dir=self._output_dir,
            callbacks=self._callbacks,
            **self._data,
        )

    def _found(self, place: str | Path) -> ResolvedModel:
        """Return the model that ``place`` names, converted to our format if necessary. Converted files are
        deleted when this `Trainer` is garbage-collected."""
        if str(place) not in self._places:
            self._places[str(place)] = resolve_model(place, self._scratch)
        return self._places[str(place)]
