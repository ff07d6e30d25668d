"""Implement the programs ``run_mindformer.py`` and ``convert_weight.py`` in ``projects/mindformers``, which
take the same arguments as MindFormers' programs of these names.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.config_and_tokenizer import tokenizer_files
from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.commands import evaluate, generate
from ppfleetx.commands.check import check_report
from ppfleetx.commands.initialize import start_with
from ppfleetx.config.errors import CheckpointError, ConfigError, UserError
from ppfleetx.config.loader import load_tree
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.read_files import (
    CONFIG,
    GENERATION_CONFIG,
    PICKLE,
    read_hf_config,
    read_stored,
)
from ppfleetx.conversion.safetensors_file import SINGLE
from ppfleetx.data.build import open_corpora
from ppfleetx.dialects.mindformers.command_line import usage
from ppfleetx.dialects.mindformers.dialect import run_of
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.launcher_env import world_size

_FOREIGN_DATA = (".mindrecord", ".tfrecord")


def run(argv: Sequence[str]) -> None:
    """Run the program ``run_mindformer.py``: train, evaluate or predict with the arguments of MindFormers."""
    if not argv or "--help" in argv or "-h" in argv:
        print(usage())
        return
    one = run_of(argv)
    world = None if one.checks else world_size()
    cfg = load_tree(one.translation.tree(), one.translation.warnings, world_size=world)
    if one.checks:
        print(check_report(cfg))
        return
    _PROGRAMS[one.mode](cfg, one.translation)


def _train(cfg: RunConfig, _: Translation) -> None:
    _require_corpus(cfg, "Train")
    cfg, ctx = start_with(cfg, reads=("Train",))
    from ppfleetx.commands.train import train

    train(cfg, ctx)


def _evaluate(cfg: RunConfig, _: Translation) -> None:
    _require_checkpoint(cfg)
    if not cfg.Model.task.offline_evaluation:
        _require_corpus(cfg, "Eval")
        if "Engine.eval_iters" not in cfg.origins:
            cfg = cfg.changed("Engine", eval_iters=_whole_batches(cfg))
    evaluate.run_loaded(cfg)


def _predict(cfg: RunConfig, translation: Translation) -> None:
    _require_checkpoint(cfg)
    if cfg.Generation.prompt is None and cfg.Generation.prompt_file is None:
        raise ConfigError("predicting needs a prompt, or a file with one a line", key="--predict_data")
    generate.run_loaded(_limit_new_tokens(cfg, translation))


_PROGRAMS: dict[str, Callable[[RunConfig, Translation], None]] = {
    "train": _train,
    "finetune": _train,
    "eval": _evaluate,
    "predict": _predict,
}


def _require_corpus(cfg: RunConfig, split: str) -> None:
    block = "train_dataset" if split == "Train" else "eval_dataset"
    key, place = f"{block}.data_loader.dataset_dir", cfg.origins.get(f"Data.{split}.dataset.input_dir")
    if place is None:
        raise ConfigError("names no corpus; give --dataset_dir DIR", key=key)
    path = Path(getattr(cfg.Data, split).dataset.input_dir)
    files = [path] if path.suffix in _FOREIGN_DATA else []
    if path.is_dir() and not any(path.glob("*.idx")):
        files += sorted(file for file in path.iterdir() if file.suffix in _FOREIGN_DATA)
    if files:
        raise ConfigError(
            f"{files[0].name} is a file of MindSpore, which is not read here. projects/mindformers/"
            "prepare_wikitext2.py makes a corpus of WikiText-2, `ppfleetx prepare` of other text",
            key=key,
            value=str(path),
            place=place,
        )


def _require_checkpoint(cfg: RunConfig) -> None:
    key = "Engine.save_load.ckpt_dir"
    path, place = cfg.Engine.save_load.ckpt_dir, cfg.origins.get(key)
    if path is None:
        raise ConfigError("needs a trained model: give --load_checkpoint DIR", key="--load_checkpoint")
    if path.endswith(".ckpt") and Path(path).is_file():
        raise ConfigError(
            "is a file of MindSpore, which is not read here. mindformers/models/gpt2/convert_weight.py "
            "makes a checkpoint of weights from Hugging Face",
            key="--load_checkpoint",
            value=path,
            place=place,
        )


def _whole_batches(cfg: RunConfig) -> int:
    tokens = sum(store.num_tokens for group in open_corpora(cfg, "Eval") for store in group)
    samples = (tokens - 1) // cfg.Data.Eval.dataset.max_seq_len
    return max(1, samples // cfg.batch.global_batch_size)


def _limit_new_tokens(cfg: RunConfig, translation: Translation) -> RunConfig:
    """Limit the new tokens so that the longest prompt and its continuation have at most ``max_decode_length``
    tokens. In MindFormers, this limit includes the prompt; our ``Generation.max_dec_len`` does not."""
    key, positions = "model.model_config.max_decode_length", cfg.Model.max_position_embeddings
    longest = max(len(ids) for ids in _prompt_ids(cfg))
    given = translation.given.get(key)
    most = positions if given is None or given.value is None else min(given.value, positions)
    if longest >= most:
        raise ConfigError(
            f"is the length of prompt and continuation together, and a prompt has {longest} tokens",
            key=key,
            value=most,
            place=None if given is None else given.place,
        )
    return cfg.changed("Generation", max_dec_len=most - longest)


def _prompt_ids(cfg: RunConfig) -> list[list[int]]:
    checkpoint = open_resolved(resolve_checkpoint(cfg.Engine.save_load.ckpt_dir))
    tokenizer = generate.find_tokenizer(cfg, checkpoint)
    return [tokenizer.encode_prompt(prompt) for prompt in generate.read_prompts(cfg)]


_HEAD_WIDTH = 64  # in every published GPT-2
_LAYER = re.compile(r"(?:transformer\.)?h\.(\d{1,5})\.ln_1\.weight")


def convert_weight(torch_path: Path, output: Path, *, layers: int, num_heads: int | None = None) -> Path:
    """Convert a GPT-2 checkpoint of Hugging Face to our format. ``config.json``, ``generation_config.json``
    and tokenizer files in the same directory are read too, if they exist. Returns the directory of the new
    checkpoint.

    Args:
        torch_path: a file in the format of ``pytorch_model.bin`` or ``model.safetensors``.
        layers: the number of layers that the file must have.
        num_heads: the number of attention heads; None: heads of size 64. Only used if there is no
            ``config.json``.
    """
    if not torch_path.is_file():
        raise ConfigError("there is no such file", key="--torch_path", value=str(torch_path))
    with tempfile.TemporaryDirectory(prefix="ppfleetx-") as directory:
        source = Path(directory)
        for name, path in _files(torch_path):
            (source / name).symlink_to(path.resolve())
        try:
            tensors = read_stored(source).tensors
            if not (source / CONFIG).exists():
                (source / CONFIG).write_text(json.dumps(_made_config(tensors, torch_path, num_heads)))
            _check_layers(tensors, read_hf_config(source), torch_path, layers)
            return convert(Conversion("hf", "ppfleetx", source, output))
        except UserError as error:  # show the paths of the user's files, not of the temporary ones
            text = str(error).replace(str(source / _weights_name(torch_path)), str(torch_path))
            raise type(error)(text.replace(str(source), str(torch_path.parent))) from None


def _files(torch_path: Path) -> Iterator[tuple[str, Path]]:
    yield _weights_name(torch_path), torch_path
    beside = [torch_path.parent / name for name in (CONFIG, GENERATION_CONFIG)]
    for path in (*filter(Path.is_file, beside), *tokenizer_files(torch_path.parent)):
        yield path.name, path


def _weights_name(torch_path: Path) -> str:
    return SINGLE if torch_path.suffix == ".safetensors" else PICKLE


def _made_config(tensors: dict[str, LazyTensor], path: Path, num_heads: int | None) -> dict[str, Any]:
    """Make Hugging Face's ``config.json`` for a GPT-2 checkpoint from the names and shapes of its tensors.
    ``num_heads`` is the number of attention heads; None: heads of size 64."""
    words, positions = (_shape(tensors, name, path) for name in ("wte.weight", "wpe.weight"))
    width = words[1]
    if num_heads is None and width % _HEAD_WIDTH:
        raise ConfigError(
            f"{path.name} has a width of {width}, which is no multiple of {_HEAD_WIDTH}: give the "
            "number of attention heads, --num_heads"
        )
    heads = width // _HEAD_WIDTH if num_heads is None else num_heads
    if heads < 1 or width % heads:
        raise ConfigError(f"must divide the width {width}", key="--num_heads", value=heads)
    return {
        "model_type": "gpt2",
        "vocab_size": words[0],
        "n_embd": width,
        "n_positions": positions[0],
        "n_layer": _count_layers(tensors),
        "n_head": heads,
    }


def _shape(tensors: dict[str, LazyTensor], name: str, path: Path) -> tuple[int, ...]:
    tensor = tensors.get(name) or tensors.get(f"transformer.{name}")
    if tensor is None or len(tensor.shape) != 2:
        raise CheckpointError(f"{path} is no GPT-2: it has no {name}")
    return tensor.shape


def _count_layers(tensors: dict[str, LazyTensor]) -> int:
    return len({found[1] for name in tensors if (found := _LAYER.fullmatch(name))})


def _check_layers(tensors: dict[str, LazyTensor], config: dict[str, Any], path: Path, layers: int) -> None:
    if config.get("model_type") != "gpt2":
        raise CheckpointError(f"{path.parent / CONFIG}: is no GPT-2 but {config.get('model_type')}")
    count = _count_layers(tensors)
    if count != layers:
        raise ConfigError(f"{path.name} has {counted(count, 'layer')}", key="--layers", value=layers)
