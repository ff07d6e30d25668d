"""Find a model of any format, and turn it into a configuration and a checkpoint that commands can load.

A model of Hugging Face or a GGUF file is converted into a temporary directory, which the processes of a job
on one machine share. A FleetX checkpoint is read directly.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ppfleetx.checkpoint.config_and_tokenizer import OF_ONE_CALL, PORTABLE_SECTIONS, portable_model
from ppfleetx.checkpoint.model_only import find_tokenizer_dir
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_resolved, resolve_checkpoint
from ppfleetx.config.errors import CheckpointError, ConfigError
from ppfleetx.config.loader import CONFIG_FILE, load_config
from ppfleetx.config.reading.overrides import Override, Setting, overridden_keys
from ppfleetx.config.reading.parse import Sections, made_sections, model_in, read_yaml
from ppfleetx.config.sections.root import DistributedConfig, RunConfig
from ppfleetx.config.shipped import shipped_configs
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.detect import is_hugging_face
from ppfleetx.conversion.fleetx import is_fleetx, read_fleetx
from ppfleetx.conversion.gguf import is_gguf
from ppfleetx.conversion.hub import hub_name, local_directory, may_be_of_hub
from ppfleetx.data.tokenizer.json_files import MERGES_FILE, TOKENIZER_FILE, VOCAB_FILE
from ppfleetx.utils.log import configure_logging, get_logger
from ppfleetx.utils.plugins import import_named_plugins

_READY = "READY"
_CONTENT = "content"
# The launcher sets these to the same values for all ranks of a job, and to different values for another job.
_JOB = ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER")


def shared_directory(
    source: Path, environ: Mapping[str, str], fill: Callable[[Path], None], stack: ExitStack
) -> Path:
    """Return a temporary directory that ``fill`` has filled from ``source``. All processes of this job on
    this machine share it. Without a launcher, all processes with the same ``source`` share it.

    Args:
        source: a directory or a file. If it has changed, another temporary directory is made.
        environ: the environment variables, which identify the job.
        fill: creates the directory at the path that it is called with. It is called by one process of each
            machine, and only if the directory does not exist yet.
        stack: the directory stays at least until this stack is closed.

    Raises:
        CheckpointError: other users could change the directory.
    """
    # Each process holds a file lock: exclusive to fill or remove the directory, shared to use it. The kernel
    # releases the lock of a killed process, and the next call removes directories that nobody uses.
    root = _temporary_root()
    place = root / _key(source, environ)
    for path in root.glob("*.lock"):
        if path.stem != place.name:
            with path.open("a") as lock:
                _remove_if_unused(path.with_suffix(""), lock)
    lock = stack.enter_context((root / f"{place.name}.lock").open("a"))
    fcntl.flock(lock, fcntl.LOCK_SH)
    if not (place / _READY).exists():
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the process that is filling the directory
        try:
            _fill(place, fill)
        except BaseException:
            lock.close()
            raise
        fcntl.flock(lock, fcntl.LOCK_SH)
    stack.callback(_remove_if_unused, place, lock)
    return place / _CONTENT


def _fill(place: Path, fill: Callable[[Path], None]) -> None:
    if (place / _READY).exists():
        return
    shutil.rmtree(place, ignore_errors=True)  # left by a process that was killed
    place.mkdir()
    try:
        fill(place / _CONTENT)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    (place / _READY).touch()


def _remove_if_unused(place: Path, lock: IO[str]) -> None:
    """Remove the directory ``place`` unless another process holds the lock file ``lock``."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock file stays, because another process may be waiting for it.
        shutil.rmtree(place, ignore_errors=True)


def _temporary_root() -> Path:
    """Create the parent of all temporary directories, and return its path. Raises CheckpointError if other
    users could change the directory.
    """
    root = Path(tempfile.gettempdir()) / f"ppfleetx-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if status.st_uid != os.getuid() or root.is_symlink() or status.st_mode & 0o022:
        raise CheckpointError(
            f"{root}, which the processes of a job share, can be changed by other users; remove it, or set "
            "TMPDIR to another place"
        )
    return root


def _key(source: Path, environ: Mapping[str, str]) -> str:
    job: list[str] = [environ.get(name, "") for name in _JOB]
    if not any(job):  # without a launcher, use this installation: another one may convert differently
        job = [__file__]
    files = sorted(
        (file.name, status.st_size, status.st_mtime_ns)
        for file in (source.iterdir() if source.is_dir() else [source])
        if file.is_file() and (status := file.stat())
    )
    named = json.dumps([job, str(source.resolve()), files])
    return hashlib.sha256(named.encode()).hexdigest()[:24]


ONE_SEQUENCE = {"Global": {"local_batch_size": 1}}
"""The batch size for commands that do not train."""
# The keys that the configuration in a checkpoint may have; `portable_config` writes no others.
_OWN_SECTIONS = ("Global", "Model", "Data", "Compress", *PORTABLE_SECTIONS)
_OWN_GLOBAL = ("seed", "local_batch_size", "micro_batch_size", "plugins")
# Sizes read from the shapes of FleetX's tensors, and the properties of ModelConfig that equal them.
_SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_layers",
    "ffn_hidden_size": "ffn_size",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found and, if necessary, converted to our format.

    Attributes:
        name: the directory as the user gave it.
        config: the model's own configuration; can be None if it was not requested.
        checkpoint: the checkpoint's path, for ``Engine.save_load.ckpt_dir`` or ``init_from``.
        tokenizer: the directory of the tokenizer's files; None if there is none.
    """

    name: str
    config: Path | Sections | None
    checkpoint: Path
    tokenizer: Path | None

    def overrides(
        self,
        given: Iterable[Override] = (),
        *,
        option: str = "CHECKPOINT",
        key: str = "Engine.save_load.ckpt_dir",
    ) -> list[Override]:
        """Return the overrides that select this checkpoint and its tokenizer, followed by the user's
        overrides.

        Args:
            given: the user's overrides. If they name a tokenizer, the checkpoint's tokenizer is not used.
            option: the command-line option that named the model, for messages.
            key: the configuration key to set to the checkpoint's path.
        """
        given = list(given)
        ours = [Setting(key, self.checkpoint, option)]
        named = overridden_keys(given) - {"Data.tokenizer.eos_token"}
        names_one = any(name.startswith("Data.tokenizer") for name in named)
        if self.tokenizer is not None and not names_one:
            ours.append(Setting("Data.tokenizer.dir", self.tokenizer, model_in(self.name)))
        return [*ours, *given]


def resolve_model(place: str | Path, stack: ExitStack, *, with_config: bool = True) -> ResolvedModel:
    """Find the model that the user names, and convert it if necessary.

    Args:
        place: a run, one of its checkpoints, a directory of Hugging Face or FleetX, a GGUF file, or
            ``hf:NAME`` for a model of the Hugging Face hub.
        stack: temporary files are removed when this stack is closed.
        with_config: whether the model's own configuration is needed.

    Raises:
        CheckpointError: there is no model, or its configuration is unknown.
        ConfigError: the configuration in the checkpoint has keys that are not allowed there, such as those of
            section ``Engine``.
    """
    import_named_plugins()  # PPFLEETX_PLUGINS: the model can use layers that a plugin registers
    is_of_hub = hub_name(place) is not None
    if is_of_hub:
        configure_logging()
    refuse_absent(place)
    path = local_directory(place)
    if is_hugging_face(path):
        return _converted(place, path, "hf", stack)
    if is_gguf(path):
        return _converted(place, path, "gguf", stack)
    if is_of_hub:
        raise CheckpointError(f"{place} is not whole in {path}, and the hub cannot be asked for the rest")
    checkpoint = open_resolved(resolve_checkpoint(path, verify=False))
    tokenizer = find_tokenizer_dir(checkpoint.path)
    if not with_config:
        return ResolvedModel(str(place), None, checkpoint.path, tokenizer)
    config: Path | Sections
    if is_fleetx(checkpoint.path):
        config = Sections(_sections_of_fleetx(checkpoint.path), model_in(place))
    elif CONFIG_FILE in checkpoint.manifest.documents:
        config = checkpoint.path / CONFIG_FILE
        _refuse_more_than_a_model(config)
    else:
        config = Sections(_sections_of_manifest(checkpoint, tokenizer), model_in(place))
    return ResolvedModel(str(place), config, checkpoint.path, tokenizer)


def refuse_absent(place: str | Path) -> None:
    """Raise CheckpointError if ``place`` does not exist. Hub names (``hf:...``) are not checked."""
    if not str(place).strip():
        raise CheckpointError("the name of the model's directory is empty")
    if hub_name(place) is None and not Path(place).exists():
        if may_be_of_hub(place):
            hint = f"; for a model on the Hugging Face hub write hf:{place}"
            raise CheckpointError(f"there is no directory {place}{hint}")
        resolve_checkpoint(place, verify=False)


def _refuse_more_than_a_model(config: Path) -> None:
    """Raise ConfigError if the configuration in a checkpoint has keys that are not allowed there, such as
    those of section ``Engine``."""
    # A checkpoint from a stranger must not choose, for example, which files are overwritten.
    tree = read_yaml(config)
    nodes = {key: node for key, node in tree.value.items() if key not in _OWN_SECTIONS}
    for section, allowed in (("Global", lambda key: key in _OWN_GLOBAL), ("Generation", _is_lasting)):
        keys = tree.value[section].value if section in tree.value else None
        if isinstance(keys, dict):
            nodes |= {f"{section}.{key}": node for key, node in keys.items() if not allowed(key)}
    for key, node in nodes.items():
        raise ConfigError(
            "the configuration in a checkpoint may describe the model and its data, and no more. If you "
            "trust this one, name it yourself with -c FILE",
            key=key,
            place=node.place,
        )


def _is_lasting(key: str) -> bool:
    return key not in OF_ONE_CALL


def _converted(place: str | Path, path: Path, source: str, stack: ExitStack) -> ResolvedModel:
    def fill(target: Path) -> None:
        whose = {"hf": "is Hugging Face's", "gguf": "is a GGUF file"}[source]
        _log().info(
            f"{path} {whose}; it is converted into {target}, which is removed at the end "
            "(`ppfleetx convert` makes a copy that stays)"
        )
        convert(Conversion(source, "ppfleetx", path, target))

    target = shared_directory(path, os.environ, fill, stack)
    step = resolve_checkpoint(target)
    config, tokenizer = made_sections(step / CONFIG_FILE, model_in(place)), find_tokenizer_dir(step)
    if tokenizer is not None and not _has_readable_files(tokenizer):
        tokenizer = path  # messages then name the user's directory, and not the temporary one
    return ResolvedModel(str(place), config, step, tokenizer)


def _has_readable_files(tokenizer: Path) -> bool:
    return any((tokenizer / name).is_file() for name in (TOKENIZER_FILE, VOCAB_FILE, MERGES_FILE))


def _sections_of_manifest(checkpoint: Checkpoint, tokenizer: Path | None) -> dict[str, Any]:
    """Return the model's configuration from the manifest of a checkpoint that an earlier version of ppfleetx
    saved without ``config.yaml``. Logs a warning, which names the tokenizer's directory ``tokenizer``.

    Raises CheckpointError if the manifest does not describe the network.
    """
    saved = checkpoint.manifest.config
    if not isinstance(saved, Mapping) or not saved.get("Model"):
        raise CheckpointError(
            f"checkpoint {checkpoint.path} does not say what network it is; give a configuration with -c FILE"
        )
    found = f"that in {tokenizer}" if tokenizer else "none; if needed give -o Data.tokenizer.dir=DIR"
    _log().warning(
        f"checkpoint {checkpoint.path} was saved by an earlier version and holds no {CONFIG_FILE} and no "
        f"tokenizer. Configuration: that in its manifest. Tokenizer: {found}"
    )
    sections = {name: saved[name] for name in PORTABLE_SECTIONS if saved.get(name) is not None}
    if isinstance(generation := sections.get("Generation"), Mapping):  # without its saved prompt
        sections["Generation"] = {key: value for key, value in generation.items() if _is_lasting(key)}
    data = {key: value for key, value in (saved.get("Data") or {}).items() if key != "tokenizer"}
    return {**ONE_SEQUENCE, **sections, "Model": portable_model(saved["Model"]), "Data": data}


def _sections_of_fleetx(path: Path) -> dict[str, Any]:
    sizes = read_fleetx(path).model
    for name, file in shipped_configs().items():
        model = load_config(file).Model
        if all(sizes.get(key) == getattr(model, ours) for key, ours in _SIZES.items()):
            _log().info(f"{path} is FleetX's; it has the sizes of {name}, whose Model section is used")
            plain = model.model_dump(mode="json") | {"module": "GPTModule", "lora": None, "num_classes": None}
            return {**ONE_SEQUENCE, "Model": portable_model(plain)}
    found = ", ".join(f"{key} {value}" for key, value in sizes.items())
    raise CheckpointError(
        f"{path} is FleetX's and has other sizes ({found}) than any shipped configuration. It does not say "
        "the number of attention heads: give a configuration with -c FILE"
    )


def as_replicas(cfg: RunConfig, processes: int) -> tuple[RunConfig, list[str]]:
    """Change a configuration so that every process holds the whole model in float32. Returns the
    configuration, and notes for the user on the changes."""
    notes = []
    plan = cfg.plan
    if plan.world_size not in (1, processes) or plan.mp * plan.pp * plan.sep * plan.ep > 1:
        notes.append(f"the plan of the configuration ({plan}) is not used: a process holds the whole model")
    if cfg.Engine.mix_precision.enable:
        notes.append("Engine.mix_precision is disabled: the model computes in float32")
    cfg = cfg.model_copy(update={"Distributed": DistributedConfig(dp_degree=processes)})
    cfg = cfg.changed("Model", sequence_parallel=False, virtual_pp_degree=1)
    precision = cfg.Engine.mix_precision.model_copy(update={"enable": False})
    return cfg.changed("Engine", mix_precision=precision), notes


def _log() -> Any:
    configure_logging()
    return get_logger()
