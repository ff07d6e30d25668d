"""Train from Python with a configuration and your own data, and use the trained model as an object."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ppfleetx.api.config_arguments import Configuration, Overrides, config_source, settings_of
from ppfleetx.api.model import GPT
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.loader import load_config, read_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.reading.overrides import Setting
from ppfleetx.core.engine.callbacks.base import Callback
from ppfleetx.data.build import load_tokenizer
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter, idx_path, optimal_dtype
from ppfleetx.data.prepare.corpus_reader import find_sources, iterate_texts
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.launcher_env import world_size

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.core.engine.run_view import EvalRecord, Run, StepRecord

TEXT_COLUMN = "text"


def corpus_prefix(data: Any, tokenizer: Tokenizer | None, directory: Path) -> str:
    """Encode training data as a tokenized corpus, ``PREFIX.bin`` and ``PREFIX.idx``, and return PREFIX. If
    the corpus exists already, nothing is written.

    Args:
        data: the prefix of an existing corpus, a text or JSON Lines file or a folder of such files, a list of
            strings, or records with a string under ``text``, such as a ``datasets.Dataset``.
        tokenizer: encodes the strings. Its end-of-document token is appended to each string.
        directory: the directory to write the corpus to.

    Raises:
        DataError: the file does not exist or has no text, an entry is not a string, or there is no tokenizer.
    """
    if isinstance(data, str | os.PathLike) and Path(idx_path(os.fspath(data))).is_file():
        return os.fspath(data)
    if tokenizer is None:
        raise DataError("texts need a tokenizer: Trainer(..., tokenizer=DIR), or Data.tokenizer.dir")
    if isinstance(data, Iterator):
        data = list(data)  # the data are read twice
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for text in texts_of(data):
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    prefix = directory / f"texts-{digest.hexdigest()[:16]}"
    if not Path(idx_path(str(prefix))).is_file():
        _write(prefix, texts_of(data), tokenizer)
    return str(prefix)


def texts_of(data: Any) -> Iterator[str]:
    """Yield the non-empty strings in ``data``: a text or JSON Lines file or a folder of such files, a list of
    strings, or records with a string under ``text``. Raises DataError if there is no such string, or an entry
    is not a string."""
    found = False
    for text in _entries(data):
        found = True
        yield text
    if not found:
        raise DataError("the training data hold no text")


def _entries(data: Any) -> Iterator[str]:
    if isinstance(data, str | os.PathLike):
        yield from iterate_texts(find_sources([data]), TEXT_COLUMN)
        return
    if not isinstance(data, Iterable):
        raise DataError(f"training data are a list of texts, a file, a prefix or a data set, not {data!r}")
    for number, entry in enumerate(data):
        text = entry.get(TEXT_COLUMN) if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise DataError(f"entry {number} of the training data is neither a text nor has one under 'text'")
        if text:
            yield text


def _write(prefix: Path, texts: Iterable[str], tokenizer: Tokenizer) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for text in texts:
            ids = [*tokenizer.encode(text), tokenizer.eod_id]
            writer.add_document(ids, [len(ids)])


_KEPT = ("step", "epoch", "loss", "lr", "grad_norm", "ppl")


class Trainer:
    """Trains the model of a configuration, like the command ``ppfleetx train``.

    Args:
        config: a YAML file, the name of a shipped configuration, nested sections, or a ``RunConfig``.
        overrides: overrides of the configuration: ``{"Engine.max_steps": 100}`` or
            ``["Engine.max_steps=100"]``.
        train_data: the training data, instead of ``Data.Train.dataset.input_dir``: a list of strings, a text
            or JSON Lines file or a folder of such files, the prefix of a ``.bin/.idx`` pair, or a
            ``datasets.Dataset`` with a column ``text``. Text is encoded into ``output_dir/data``.
        eval_data: the evaluation data in the same forms, or several sets by name:
            ``{"wiki": ..., "code": ...}``. None: the share of ``train_data`` that
            ``Data.Eval.dataset.split`` sets aside, or no evaluation if the configuration has no
            ``Data.Eval``.
        tokenizer: encodes the text: a directory, or a :class:`Tokenizer`; None: ``Data.tokenizer``.
        output_dir: directory of the run (``Engine.save_load.output_dir``).
        callbacks: objects whose methods the training loop calls; see
            :class:`~ppfleetx.core.engine.callbacks.base.Callback`.

    Attributes:
        cfg: the whole configuration.
        history: the records of the run: ``{"kind": "train", "step", "epoch", "loss", "lr", "grad_norm"}`` for
            each step, ``{"kind": "eval", "step", "loss", "ppl"}`` for each evaluation (with ``"set"`` if the
            set has a name).

    Raises:
        UserError: there is a mistake in the configuration or the data.
    """

    def __init__(
        self,
        config: Configuration,
        overrides: Overrides | None = None,
        *,
        train_data: Any = None,
        eval_data: Any = None,
        tokenizer: Tokenizer | str | Path | None = None,
        output_dir: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        for one in callbacks:
            if isinstance(one, type):
                raise ConfigError(f"callbacks are objects; give {one.__name__}() in place of {one.__name__}")
        self._callbacks, self._model, self._has_trained = list(callbacks), None, False
        self.history: list[dict[str, Any]] = []
        self._source = config_source(config)
        given = settings_of(overrides)
        if output_dir is not None:
            given.append(Setting("Engine.save_load.output_dir", output_dir, "output_dir"))
        raw = read_config(self._source, given)[0]
        home = Path(raw.Engine.save_load.output_dir) / "data"
        if tokenizer is not None:
            given.append(Setting("Data.tokenizer.dir", _tokenizer_dir(tokenizer, home), "tokenizer"))
            raw = read_config(self._source, given)[0]
        given += _data_settings(raw, train_data, eval_data, home)
        self._overrides = given
        self.cfg = load_config(self._source, given, world_size=world_size())

    def fit(self) -> Self:
        """Train to ``Engine.max_steps``, and evaluate and save as configured. Returns this trainer.

        Raises:
            UserError: the run cannot start or fails, e.g. because the output directory holds another run.
        """
        self._model = None
        cfg, ctx = start_with(self.cfg, reads=("Train", "Eval"))
        from ppfleetx.commands.train import train

        engine = train(cfg, ctx, [_History(self.history), *self._callbacks])
        self._has_trained = True
        if _is_whole(cfg.plan):
            self._model = GPT(
                cfg,
                engine.runner.model,
                load_tokenizer(cfg),
                epoch=engine.state.epoch,
                step=engine.state.step,
            )
        return self

    def evaluate(self) -> EvalRecord | dict[str, EvalRecord]:
        """Evaluate the last checkpoint in ``output_dir`` on ``Data.Eval``. Before :meth:`fit`, evaluate
        ``Engine.save_load.ckpt_dir`` instead if it is set. Returns a record with loss and perplexity. If
        ``Data.Eval.sets`` has named sets, returns ``{name: record}``.

        Raises:
            UserError: there is no checkpoint, or no evaluation set.
        """
        cfg, ctx = start_with(self._with_checkpoint(), reads=("Eval",))
        from ppfleetx.commands.train import evaluate

        records = evaluate(cfg, ctx)
        return {record.name: record for record in records} if cfg.Data.Eval.sets else records[0]

    def predict(self, prompts: Any, **options: Any) -> Any:
        """Generate continuations of one or more prompts with the trained model. Calls :meth:`GPT.generate`,
        which describes the arguments and results."""
        return self.model.generate(prompts, **options)

    @property
    def model(self) -> GPT:
        """The trained model. After :meth:`fit`, this is the model in memory. Before :meth:`fit`, or if the
        plan splits the model (tensor, pipeline or context parallelism, ZeRO stage 3), it is loaded from the
        checkpoint that :meth:`evaluate` uses. Raises UserError if there is no checkpoint."""
        if self._model is None:
            place = self._with_checkpoint().Engine.save_load.ckpt_dir
            self._model = GPT.from_pretrained(place)
        return self._model

    def _with_checkpoint(self) -> RunConfig:
        options = self.cfg.Engine.save_load
        if options.ckpt_dir is not None:
            # After training, use the run's own checkpoint, not the one that it started from.
            trained = options.model_copy(update={"ckpt_dir": options.output_dir})
            return self.cfg.changed("Engine", save_load=trained) if self._has_trained else self.cfg
        more = Setting("Engine.save_load.ckpt_dir", options.output_dir, "output_dir")
        return load_config(self._source, [*self._overrides, more], world_size=self.cfg.plan.world_size)


class _History(Callback):
    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def on_step_end(self, run: Run, record: StepRecord) -> None:
        self._records.append(self._kept("train", record))

    def on_eval_end(self, run: Run, record: EvalRecord) -> None:
        named = {} if record.name is None else {"set": record.name}
        self._records.append({**self._kept("eval", record), **named})

    def _kept(self, kind: str, record: StepRecord | EvalRecord) -> dict[str, Any]:
        return {"kind": kind} | {name: getattr(record, name) for name in _KEPT if hasattr(record, name)}


def _is_whole(plan: ParallelPlan) -> bool:
    return plan.mp == plan.pp == plan.sep == 1 and not (plan.sharding > 1 and plan.sharding_stage == 3)


def _tokenizer_dir(tokenizer: Tokenizer | str | Path, home: Path) -> str:
    """Return a directory with the tokenizer's files. A :class:`Tokenizer` object is first saved to a
    subdirectory of ``home``."""
    if not isinstance(tokenizer, Tokenizer):
        return str(tokenizer)
    place = home / f"tokenizer-{tokenizer.fingerprint[:16]}"
    if not place.is_dir():
        tokenizer.save(place)
    return str(place)


def _refuse_other_records(raw: RunConfig, given: Mapping[str, str]) -> None:
    """Raise ConfigError if there are data for a set whose dataset cannot read them, because it reads records
    (such as conversations) and not texts. ``given`` has the argument with the data of each set, as in
    ``{"Train": "train_data"}``."""
    for mode, argument in given.items():
        section = getattr(raw.Data, mode)
        if section is not None and not section.dataset.is_corpus:
            raise raw.error(
                f"Data.{mode}.dataset.name",
                f"{argument} are texts, which this dataset does not read. Name its file in "
                f"Data.{mode}.dataset.input_dir and split in place of {argument}; for texts set "
                f"Data.{mode}.dataset.name to GPTDataset",
            )


def _data_settings(raw: RunConfig, train_data: Any, eval_data: Any, home: Path) -> list[Setting]:
    if train_data is None and eval_data is None:
        return []
    trained = {} if train_data is None else {"Train": "train_data"}
    _refuse_other_records(raw, {**trained, "Eval": "train_data" if eval_data is None else "eval_data"})
    tokenizer = load_tokenizer(raw)
    found: list[Setting] = []
    for mode, data, whole in (("Train", train_data, [1, 0, 0]), ("Eval", eval_data, [0, 1, 0])):
        section = getattr(raw.Data, mode)
        if data is None:
            continue
        key, place = f"Data.{mode}.dataset", f"{mode.lower()}_data"
        if mode == "Eval" and isinstance(data, Mapping):
            sets = {name: {"input_dir": corpus_prefix(one, tokenizer, home)} for name, one in data.items()}
            found.append(Setting("Data.Eval.sets", sets, "eval_data"))
        else:
            prefix = corpus_prefix(data, tokenizer, home)
            found.append(Setting(f"{key}.input_dir", prefix, place))
            found += [Setting("Data.Eval.sets", {}, place)] if mode == "Eval" else []
        if eval_data is not None or section is None:
            found.append(Setting(f"{key}.split", whole, place))
    if eval_data is None and raw.Data.Eval is not None:
        if raw.Data.Train is None:
            raise ConfigError(
                "give eval_data too: the configuration has no Data.Train, whose split would set shares aside",
                key="Data.Eval",
            )
        found.append(Setting("Data.Eval.dataset.input_dir", prefix, "train_data"))
        found.append(Setting("Data.Eval.sets", {}, "train_data"))
    return found
