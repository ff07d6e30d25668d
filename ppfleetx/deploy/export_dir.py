"""The directory of an exported model: layout, manifest and checks.

::

    rank_0/
      export.json             the manifest: describes the program, and lists size and SHA-256 of the files
      model.json              the program
      model.pdiparams         its weights
      model_cpu_ops_16.json   optional: the same program with our C++ operators (ppfleetx/nn/cpu_ops)
      tokenizer/              files that ppfleetx and Hugging Face transformers can load

For a quantized model, the optional program is ``model_blocks_16.json``, in which one C++ operator runs all
transformer blocks. If that operator does not support the model, the optional program is
``model_quantized_ops_16.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.sections.generation import GenerationConfig, TokenOptions
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.nn.cpu_ops.compiled import WIDTH
from ppfleetx.utils.input_files import opened, read_json
from ppfleetx.utils.machine import BFLOAT16, CPUINFO, flags_in, read_cpuinfo

FORMAT, VERSION = "ppfleetx-export", 3
_READ = (2, 3)  # version 2 has no checksum, and its programs support only one end token
RANK_DIRECTORY, MANIFEST_FILE, PROGRAM, TOKENIZER_DIRECTORY = "rank_0", "export.json", "model", "tokenizer"
PROGRAM_FILE, WEIGHTS_FILE = f"{PROGRAM}.json", f"{PROGRAM}.pdiparams"
CPU_OPS_FILE, QUANTIZED_OPS_FILE, BLOCKS_FILE = (
    f"{PROGRAM}_{operators}_{WIDTH}.json" for operators in ("cpu_ops", "quantized_ops", "blocks")
)
"""Names of the program files that use our C++ operators: for a model that is not quantized, for a quantized
model, and for a quantized model whose transformer blocks run in one operation. The programs store matrices
in groups of `WIDTH` columns."""
_FIRST_WITH_CHECKSUM = 3
_MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_KEY = "Inference.model_dir"
_PROGRAM_READS = (
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
)
_AGAIN = "export the model again with ppfleetx export"


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest: its size in bytes, and its SHA-256 in hexadecimal."""

    size: StrictInt
    sha256: StrictStr


@dataclass(frozen=True, config={"extra": "forbid"})
class ExportManifest:
    """The manifest of an exported model, ``export.json``.

    Attributes:
        vocab_size: number of token ids that the program can generate, from 0 on.
        end_id, end_token: id and text of the tokenizer's end-of-document token.
        max_positions: maximum length of prompt plus continuation, in tokens.
        model: the ``Model`` section of the configuration.
        generation: the keys of the ``Generation`` section that the user set.
        checkpoint: name of the checkpoint that was exported.
        inputs: the dtypes of the program's inputs, by name.
        files: size and checksum of each file, by relative path.
    """

    vocab_size: StrictInt
    end_id: StrictInt
    end_token: StrictStr
    max_positions: StrictInt
    model: dict[str, Any]
    generation: dict[str, Any]
    tokenizer_fingerprint: StrictStr
    checkpoint: StrictStr
    inputs: dict[str, str]
    paddle_version: StrictStr
    files: dict[str, FileEntry]

    def write(self, directory: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["checksum"] = _checksum(content)
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (directory / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """Return the size and checksum of each file below ``directory``, by relative path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): FileEntry(path.stat().st_size, _sha256(path))
        for path in paths
    }


def open_export(model_dir: str | Path, *, verify: bool = True) -> tuple[Path, ExportManifest]:
    """Find an exported model in ``model_dir`` or ``model_dir``/rank_0, and return its directory and manifest.
    Raises ConfigError if there is no exported model, if its format is not supported, or if a file is missing
    or damaged.

    Args:
        verify: whether to check the SHA-256 of each file. Sizes are always checked.
    """
    directory = _find(Path(model_dir))
    manifest = _read(directory / MANIFEST_FILE)
    for name, entry in manifest.files.items():
        _check_file(directory / name, entry, verify)
    return directory, manifest


def is_export(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).is_file()


def foreign_files(directory: Path) -> list[str]:
    """Return the relative paths of files in the directory that do not belong to the export. If the manifest
    is damaged, the list is empty."""
    try:
        own = {*_read(directory / MANIFEST_FILE).files, MANIFEST_FILE}
    except ConfigError:
        return []
    found = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(directory).as_posix() for path in found} - own)


def _find(model_dir: Path) -> Path:
    for directory in (model_dir, model_dir / RANK_DIRECTORY):
        if is_export(directory):
            return directory
    if not model_dir.is_dir():
        rule = "there is no such directory; ppfleetx export makes one from a checkpoint"
        raise ConfigError(rule, key=_KEY, value=model_dir)
    for directory in (model_dir, model_dir / RANK_DIRECTORY):
        if any(directory.glob("*.pdmodel")):
            raise _error(model_dir, f"holds a program of PaddleFleetX, which cannot be read here; {_AGAIN}")
        if (directory / PROGRAM_FILE).exists() or (directory / WEIGHTS_FILE).exists():
            raise _error(model_dir, f"is damaged: {directory / MANIFEST_FILE} is missing; {_AGAIN}")
    raise ConfigError(
        f"holds no exported model (no {MANIFEST_FILE} in it or in {RANK_DIRECTORY}/); ppfleetx export makes "
        "one from a checkpoint",
        key=_KEY,
        value=model_dir,
    )


def _read(path: Path) -> ExportManifest:
    try:
        content = read_json(path, max_bytes=_MAX_MANIFEST_BYTES)
        written_as, version = content.pop("format"), content.pop("version")
    except (CheckpointError, KeyError) as error:
        raise _error(path, f"is damaged: it is not the manifest of an export; {_AGAIN}") from error
    if written_as != FORMAT or type(version) is not int or version not in _READ:
        known = " and ".join(map(str, _READ))
        raise _error(
            path,
            f"is of format {shown(written_as)} {shown(version)}, this version reads {FORMAT} {known}; "
            f"{_AGAIN}",
        )
    checksum = content.pop("checksum", None)
    if version >= _FIRST_WITH_CHECKSUM:
        whole = {"format": written_as, "version": version, **content}
        if checksum != _checksum(whole):
            raise _error(path, f"is damaged or was edited: its checksum does not match; {_AGAIN}")
    try:
        return TypeAdapter(ExportManifest).validate_python(content)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise _error(path, f"is damaged: {shown(field)} is unknown, missing or invalid; {_AGAIN}") from error


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    if not path.is_file():
        raise _error(path, f"is missing; {_AGAIN}")
    size = path.stat().st_size
    if size != entry.size:
        raise _error(path, f"is damaged: it has {size} bytes instead of {entry.size}; {_AGAIN}")
    if verify and _sha256(path) != entry.sha256:
        raise _error(path, f"is damaged: its checksum is not that of the manifest; {_AGAIN}")


def _sha256(path: Path) -> str:
    with opened(path, ConfigError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _error(path: Path, rule: str) -> ConfigError:
    return ConfigError(f"{path}: {rule}", key=_KEY)


_INSTEAD = "generate from the checkpoint with ppfleetx generate"


def check_generation(section: GenerationConfig, places: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if an option of the ``Generation`` section does not work with exported programs.
    ``places`` maps each key to the file and line that set it, for error messages."""
    unread = sorted({*TokenOptions.model_fields, "logprobs"} - {*_PROGRAM_READS})
    rules = {
        "decode_strategy": "decodes by greedy_search or sampling",
        "use_cache": "always keeps keys and values",
        "forced_bos_token_id": "chooses every token",
        "forced_eos_token_id": "chooses every token",
        **dict.fromkeys(unread, f"chooses tokens by {', '.join(_PROGRAM_READS)}"),
    }
    plain = GenerationConfig()
    for key, rule in rules.items():
        value, name = getattr(section, key), f"Generation.{key}"
        if value not in (getattr(plain, key), "greedy_search"):
            raise ConfigError(
                f"an exported program {rule}; leave it out, or {_INSTEAD}",
                key=name,
                value=value,
                place=(places or {}).get(name),
            )


def check_onednn(section: GenerationConfig, vocab_size: int, places: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if the ``Generation`` section samples from the whole vocabulary, without top-k.
    Paddle 3.3.1 cannot do this with oneDNN."""
    if section.decode_strategy == "sampling" and not 0 < section.top_k < vocab_size:
        raise ConfigError(
            f"with Inference.onednn, sampling is from the 1 to {vocab_size - 1} likeliest tokens (in Paddle "
            "3.3.1 anything else raises an error without a message); give another top_k, or "
            "-o Inference.onednn=False",
            key="Generation.top_k",
            value=section.top_k,
            place=(places or {}).get("Generation.top_k"),
        )


def check_inference(cfg: RunConfig, device: str) -> None:
    """Raise ConfigError if this machine cannot run exported programs with the options of ``Inference``."""
    options = cfg.Inference
    if options.mp_degree not in (None, 1):
        raise cfg.error(
            "Inference.mp_degree",
            "an export holds the whole model (Paddle's export silently leaves out communication), so "
            f"this is 1; for a model larger than one device, {_INSTEAD} under Distributed.mp_degree",
        )
    if device != "cpu":
        for key, plain in (("onednn", False), ("precision", "fp32"), ("cpu_threads", None)):
            if getattr(options, key) != plain:
                raise cfg.error(f"Inference.{key}", f"is for the CPU, and Global.device is {device}")
        return
    if options.TensorRT is not None:
        raise ConfigError(
            "TensorRT needs a GPU, and Global.device is the CPU; set Inference.TensorRT=null",
            key="Inference.TensorRT",
            place=cfg.origins.get("Inference.TensorRT"),
        )
    if options.precision == "bf16" and not has_bfloat16():
        rule = f"this CPU has none of {', '.join(sorted(BFLOAT16))}; use fp32"
        raise cfg.error("Inference.precision", rule)


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the CPU has bfloat16 matrix instructions, according to the file ``cpuinfo``."""
    return not flags_in(read_cpuinfo(cpuinfo)).isdisjoint(BFLOAT16)
