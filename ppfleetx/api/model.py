"""A trained GPT as a Python object: generate text, compute logits and loss, load and save.

In shapes, b is the number of sequences, s the number of tokens and V the size of the vocabulary.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from ppfleetx.api.config_arguments import Configuration, Overrides, config_source, settings_of
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.validate import section_of
from ppfleetx.generation.text_io import as_prompts
from ppfleetx.utils.device_support import expected_device, not_supported_reasons
from ppfleetx.utils.process_env import import_paddle, prepare_process

if TYPE_CHECKING:
    import paddle

    from ppfleetx.checkpoint.reader import Checkpoint
    from ppfleetx.config.sections.root import ModelConfig, RunConfig
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.generation.generator import Generation
    from ppfleetx.generation.text_io import Prompt
    from ppfleetx.models.staged_model import StagedModel


Piece = tuple[int, int, str]
"""A piece of generated text: (index of the prompt, index of the prompt's continuation, text)."""


class _AbandonedError(Exception):
    """Raised in the thread of :func:`stream_of` to end generation after the reader has closed the
    iterator."""


def stream_of(generate: Callable[[Callable[[int, int, str], None]], Any]) -> Iterator[Piece]:
    """Yield the text that ``generate`` produces, piece by piece, while it runs in a background thread. A
    piece is (index of the prompt, index of the continuation, text).

    If generation fails, its error is raised after the last piece. Generation stops when the iterator is
    closed.

    Args:
        generate: gets a callback as its argument, and calls it with the three values of each piece.
    """
    pieces: queue.Queue[Piece | BaseException | None] = queue.Queue()
    abandoned = threading.Event()

    def on_text(prompt: int, copy: int, piece: str) -> None:
        if abandoned.is_set():
            raise _AbandonedError
        pieces.put((prompt, copy, piece))

    def work() -> None:
        end: BaseException | None = None
        try:
            generate(on_text)
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  (raised in the thread that reads)
            end = error
        pieces.put(end)

    thread = threading.Thread(target=work, name="generation", daemon=True)
    thread.start()
    try:
        while True:
            found = pieces.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        abandoned.set()
        thread.join()


Tokens = "paddle.Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]]"


class GPT:
    """A trained model with its tokenizer. Create one with :func:`load` or :meth:`from_pretrained`.

    Args:
        checkpoint: the checkpoint that the weights were loaded from; None if they were trained in this
            process.

    Attributes:
        cfg: the whole configuration.
        network: the Paddle layer; its ``state_dict`` has the parameters.
        tokenizer: the model's tokenizer; None if it has none.
        generation: default options of :meth:`generate`.
        epoch, step: the epoch and step up to which the model was trained.
    """

    def __init__(
        self,
        cfg: RunConfig,
        network: StagedModel,
        tokenizer: Tokenizer | None,
        *,
        epoch: int = 0,
        step: int = 0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.cfg, self.network, self.tokenizer = cfg, network, tokenizer
        self.generation, self.epoch, self.step = cfg.Generation, epoch, step
        # For save(): where the weights come from, and their element types in that checkpoint.
        self._source: Mapping[str, Any] = {}
        self._stored: dict[str, str] = {}
        if checkpoint is not None:
            self._source = checkpoint.manifest.state.get("source") or {}
            self._stored = {name: checkpoint.entry(name).dtype for name in checkpoint.names()}
        self._generator: Any = None
        network.eval()

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        config: Configuration | None = None,
        overrides: Overrides | None = None,
    ) -> Self:
        """Load a model from the output directory of a run, a checkpoint, a Hugging Face or FleetX model, or a
        GGUF file.

        Args:
            directory: the path of the model. ``hf:ORG/NAME`` or ``hf:ORG/NAME@REVISION`` downloads a model
                from the Hugging Face hub.
            config: a configuration to use instead of the checkpoint's own.
            overrides: overrides of the configuration, e.g. ``{"Global.device": "cpu"}``.

        Raises:
            UserError: the directory does not exist or does not hold an intact model, or the model cannot run
                on this machine.
        """
        from ppfleetx.commands.resolve_model import resolve_model

        with ExitStack() as stack:
            place = resolve_model(directory, stack, with_config=config is None)
            source = place.config if config is None else config_source(config)
            cfg = load_config(source, place.overrides(settings_of(overrides), option="directory"))
            if cfg.Model.task.classifies:
                rule = "a classifier has no next token; ppfleetx.load takes models that continue text"
                raise cfg.error("Model.module", rule)
            return cls._restored(cfg, place.tokenizer)

    @classmethod
    def _restored(cls, cfg: RunConfig, tokenizer_dir: Path | None) -> Self:
        ctx = ready(cfg)
        from ppfleetx.commands.generate import find_tokenizer
        from ppfleetx.commands.train import build_runner, find_weights

        start = find_weights(cfg, ctx)
        runner = build_runner(cfg, ctx, train=False)
        start.restore_weights(runner, cfg.Model)
        named = tokenizer_dir is not None or cfg.Data.tokenizer is not None
        tokenizer = find_tokenizer(cfg, start.checkpoint) if named else None
        manifest = start.checkpoint.manifest
        return cls(
            cfg,
            runner.model,
            tokenizer,
            epoch=manifest.epoch,
            step=manifest.step,
            checkpoint=start.checkpoint,
        )

    # ---- properties of the model

    @property
    def config(self) -> ModelConfig:
        """The section ``Model`` of the model's configuration, with the sizes of the network."""
        return self.cfg.Model

    @property
    def num_parameters(self) -> int:
        """The total number of weights. An output head that shares the embedding's matrix counts once."""
        return sum(int(parameter.size) for parameter in self.network.parameters())

    def named_parameters(self) -> Iterator[tuple[str, paddle.Tensor]]:
        """Iterate over all parameters as (name, tensor), with names such as
        ``decoder.layers.0.mlp.fc1.weight``."""
        return ((parameter.info.name, parameter) for parameter in self.network.parameters())

    def __repr__(self) -> str:
        model = self.cfg.Model
        return (
            f"GPT({model.num_layers} layers, hidden {model.hidden_size}, {self.num_parameters:,} parameters)"
        )

    def train(self, mode: bool = True) -> Self:
        """Switch dropout on (``mode=True``) or off, for a custom training loop."""
        self.network.train() if mode else self.network.eval()
        self._generator = None  # discard its copies of the weights, because training changes the weights
        return self

    def eval(self) -> Self:
        """Switch dropout off. In a loaded model, dropout is off already."""
        return self.train(False)

    def with_tokenizer(self, tokenizer: Tokenizer) -> Self:
        """Return a new object with the same network and another tokenizer."""
        other = copy(self)
        other.tokenizer, other._generator = tokenizer, None
        return other

    # ---- computing with the model

    def __call__(self, tokens: Tokens) -> paddle.Tensor:
        """Compute float32 next-token logits ``[b, s, V]`` for each position of the sequences.

        Args:
            tokens: ids ``[b, s]``, or ``[s]`` for one sequence.

        Raises:
            DataError: an id is outside the model's vocabulary, or a sequence is longer than the model's
                context length.
        """
        logits_sbv = self.network(self._ids(tokens))
        return logits_sbv[..., : self.cfg.Model.vocab_size].astype("float32").transpose([1, 0, 2])

    def loss(self, tokens: Tokens) -> paddle.Tensor:
        """Compute the mean next-token cross entropy, in nats, of sequences ``[b, s]``. The result is a scalar
        that can be differentiated.

        Raises:
            DataError: an id is outside the model's vocabulary, or a sequence has only one token or is longer
                than the model's context length.
        """
        from ppfleetx.nn.loss import cross_entropy

        ids = self._ids(tokens)
        if ids.shape[1] < 2:
            raise DataError("a sequence of one token has nothing to predict; give two or more")
        return cross_entropy(self(ids[:, :-1]), ids[:, 1:]).mean().astype("float32")

    def _ids(self, tokens: Tokens) -> paddle.Tensor:
        import paddle

        try:
            given = tokens.numpy() if isinstance(tokens, paddle.Tensor) else np.asarray(tokens)
        except ValueError as error:  # lists of different lengths
            raise DataError("tokens are ids [b, s] of sequences of one length") from error
        if given.ndim == 1:
            given = given[None]
        if given.ndim != 2 or not given.size or given.dtype.kind not in "iu":
            raise DataError(
                f"tokens are ids [b, s] of sequences of one length, not {given.dtype} {list(given.shape)}"
            )
        vocab, positions = self.cfg.Model.vocab_size, self.cfg.Model.max_position_embeddings
        lowest, highest = int(given.min()), int(given.max())
        if lowest < 0 or highest >= vocab:
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"token id {wrong} is outside the model's vocabulary, 0 to {vocab - 1}")
        if given.shape[1] > positions:
            raise DataError(f"{given.shape[1]} tokens are more than the model's {positions} positions")
        return paddle.to_tensor(given.astype(np.int64))

    @overload
    def generate(self, prompts: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[str]: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, stream: Literal[True], **options: Any
    ) -> Iterator[tuple[int, int, str]]: ...
    @overload
    def generate(self, prompts: Any, *, stream: Literal[False] = False, **options: Any) -> Any: ...
    def generate(self, prompts: Any, *, stream: bool = False, seed: int | None = None, **options: Any) -> Any:
        """Generate continuations of one or more prompts.

        Args:
            prompts: a string, a sequence of token ids, or a list of these. A model without a tokenizer
                accepts only token ids, and its results have ids but no text.
            stream: True returns an iterator over pieces of the text while it is generated. For a list of
                prompts, it yields tuples (index of the prompt, index of the continuation, piece of text).
            seed: seed for sampling; None: ``Generation.seed`` of the model's configuration, or else its
                ``Global.seed``.
            options: keys of the section ``Generation`` whose values replace the model's own, e.g.
                ``max_dec_len=50, temperature=0.8, top_k=5``.

        Returns:
            For one prompt, a :class:`~ppfleetx.generation.generator.Generation` (``text``, ``ids``,
            ``finish_reason``, and ``logprobs`` or the ``score`` of beam search). If ``num_return_sequences``
            is above 1, a list of Generation objects. For a list of prompts, a list with the result for each
            prompt.

        Raises:
            ConfigError: an option is unknown, has a wrong value, or is not used by the decoding strategy
                (such as ``num_beams`` with sampling).
            DataError: a prompt is neither a string nor token ids, or a token id is outside the tokenizer's
                vocabulary.
        """
        if seed is not None:
            options["seed"] = int(seed) if isinstance(seed, np.integer) else seed
        cfg = self._options(options)
        batch, single = as_prompts(prompts)
        if stream and self.tokenizer is None:
            raise ConfigError("a stream is of text, and the model has no tokenizer", key="Data.tokenizer")
        if stream and single and cfg.num_return_sequences > 1:
            raise ConfigError(
                "the pieces of several continuations of one prompt could not be told apart. Give a list of "
                "one prompt: its stream says to which continuation each piece belongs",
                key="num_return_sequences",
                value=cfg.num_return_sequences,
            )

        def run(on_text: Callable[[int, int, str], None] | None = None) -> list[list[Generation]]:
            return self.generator.generate(batch, cfg, seed=self.cfg.Global.seed, on_text=on_text)

        if stream:
            pieces = stream_of(run)
            return (piece for _, _, piece in pieces) if single else pieces
        found = run()
        results = [each[0] for each in found] if cfg.num_return_sequences == 1 else found
        return results[0] if single else results

    def _options(self, options: dict[str, Any]) -> GenerationConfig:
        said = self.generation.model_dump(exclude={"prompt", "prompt_file"}, exclude_unset=True)
        if options.get("prompt") is not None or options.get("prompt_file") is not None:
            raise ConfigError("prompts are the first argument of generate", key="Generation.prompt")
        cfg = section_of(GenerationConfig, {**said, **options})
        if (unread := cfg.first_unused_option(options)) is not None:
            key, strategy = unread
            raise ConfigError(
                f"only {strategy} reads it, and the strategy is {cfg.decode_strategy}: give "
                f"decode_strategy='{strategy}' too",
                key=key,
                value=options[key],
            )
        return cfg

    @property
    def generator(self) -> Any:
        """The text generator behind :meth:`generate`. It copies the weights when it is first used;
        :meth:`train` and :meth:`eval` discard the copy.
        """
        from ppfleetx.commands.generate import assistants_for
        from ppfleetx.generation.generator import Generator

        if self._generator is None:
            self._generator = Generator(
                self.network, self.cfg.Model, self.tokenizer, load_assistant=assistants_for(self.cfg)
            )
        return self._generator

    # ---- saving the model

    def save(self, directory: str | Path) -> Path:
        """Write the weights as a checkpoint below ``directory``. :func:`load` and all commands can read it.

        Weights that were loaded in 16 bits are stored in 16 bits again, unless this would lose information.

        Returns:
            The directory of the checkpoint, ``directory/epoch_E_step_S``.

        Raises:
            CheckpointError: the checkpoint exists already, or cannot be written.
        """
        from ppfleetx.checkpoint.model_only import save_weights
        from ppfleetx.checkpoint.state_dict import model_slices
        from ppfleetx.checkpoint.weights import in_stored_types

        return save_weights(
            directory,
            self.cfg,
            in_stored_types(list(model_slices(self.named_parameters())), self._stored),
            tokenizer=self.tokenizer,
            source=self._source or None,
            epoch=self.epoch,
            step=self.step,
        )

    def to_huggingface(self, directory: str | Path) -> Path:
        """Write the model and its tokenizer in Hugging Face's format (``AutoModelForCausalLM``).

        Adapters are merged into the base weights. A model that was loaded from Hugging Face's format keeps
        its ``config.json`` and ``generation_config.json`` and, as in :meth:`save`, its element type.

        Raises:
            CheckpointError: ``directory`` is not empty, or transformers does not support this network.
        """
        from ppfleetx.checkpoint.adapters import merge_lora
        from ppfleetx.conversion.convert import Conversion, convert

        with tempfile.TemporaryDirectory(prefix="ppfleetx-") as scratch:
            source = self.save(Path(scratch) / "model")
            if self.cfg.Model.lora is not None:
                source = merge_lora(source, Path(scratch) / "merged")
            return convert(Conversion("ppfleetx", "hf", source, Path(directory)))


def load(
    directory: str | Path, *, config: Configuration | None = None, overrides: Overrides | None = None
) -> GPT:
    """Load a model from a run, a checkpoint, a Hugging Face or FleetX model, or a GGUF file. Calls
    :meth:`GPT.from_pretrained`, which describes the arguments and errors."""
    return GPT.from_pretrained(directory, config=config, overrides=overrides)


def ready(cfg: RunConfig) -> ParallelContext:
    """Prepare this process to run the model of ``cfg``: import Paddle and select the device.

    Raises:
        ConfigError: the configured device does not exist, or the model cannot run on it.
    """
    place = cfg.origins.get("Global.device")
    device = expected_device(cfg.Global.device, place)
    if reasons := not_supported_reasons(cfg, device):
        raise ConfigError("this model cannot run here:\n  " + "\n  ".join(reasons))
    prepare_process(device=device)
    import_paddle()
    import paddle

    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.device import choose_device

    chosen = choose_device(cfg.Global.device, place)
    paddle.set_device(chosen)
    return ParallelContext.single(chosen)
