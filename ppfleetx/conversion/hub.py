"""Download models from the Hugging Face hub, by names such as ``hf:org/name`` or ``hf:org/name@revision``.
The environment variables of ``huggingface_hub``, such as ``HF_TOKEN``, apply."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.config_and_tokenizer import TOKENIZER_FILES
from ppfleetx.config.errors import CheckpointError, UserError, shown
from ppfleetx.config.message_text import counted
from ppfleetx.conversion.detect import HUB
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.read_files import (
    CONFIG,
    GENERATION_CONFIG,
    PICKLE,
    PICKLE_INDEX,
    read_hf_config,
)
from ppfleetx.conversion.safetensors_file import INDEX, SINGLE
from ppfleetx.data.tokenizer.json_files import NAMED_TEMPLATES
from ppfleetx.utils.input_files import read_json
from ppfleetx.utils.installed import NotInstalledError
from ppfleetx.utils.log import get_logger

DEFAULT_REVISION = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]*", re.ASCII)
_SMALL = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
_BLOCK = 1 << 20


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub. ``revision`` is a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{HUB}{self.repo}{at}"


def hub_name(place: str | Path) -> HubName | None:
    """Parse ``hf:org/name[@revision]``. Returns None if ``place`` does not begin with ``hf:``. Raises
    CheckpointError if the name is invalid."""
    text = str(place)
    if not text.startswith(HUB):
        return None
    repo, at, revision = text.removeprefix(HUB).partition("@")
    if not _NAME.fullmatch(repo) or ".." in text or (at and not _REVISION.fullmatch(revision)):
        raise CheckpointError(
            f"{shown(text)} names no model: write hf:ORGANIZATION/NAME or hf:.../NAME@REVISION"
        )
    return HubName(repo, revision or DEFAULT_REVISION)


def may_be_of_hub(place: str | Path) -> bool:
    """Return whether ``place`` has the form ``org/name``. It may be a model on the hub, given without the
    prefix ``hf:``."""
    return _NAME.fullmatch(str(place)) is not None


def local_directory(place: str | Path) -> Path:
    """Return the local directory of a model. If ``place`` begins with ``hf:``, the model is downloaded to the
    cache first. If the hub cannot be reached, the files in the cache are used. A path without ``hf:`` is
    returned unchanged.

    Raises CheckpointError if the download fails or the model is not supported; NotInstalledError if
    ``huggingface_hub`` is not installed.
    """
    name = hub_name(place)
    return Path(place) if name is None else _Download(name).run()


class _Download:
    def __init__(self, name: HubName) -> None:
        self.name = name
        try:
            # The package loads submodules lazily, so import each by name.
            import huggingface_hub
            from huggingface_hub import constants, errors, utils
        except ModuleNotFoundError:
            raise NotInstalledError(
                f"{name} is on the Hugging Face hub, and huggingface_hub, which downloads from there, is not "
                "installed in this Python: run `pip install 'ppfleetx[hub]'`"
            ) from None
        self._hub, self._errors, self._utils = huggingface_hub, errors, utils
        # Read the environment here, because the library reads it only on import.
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        self.cache = os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE
        self.is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")

    def run(self) -> Path:
        if not sys.stderr.isatty():
            self._utils.disable_progress_bars()
        info = None if self.is_offline else self._info()
        if info is None:
            config = self._held(CONFIG, self.name.revision)
            if config is None:
                raise CheckpointError(
                    f"{self.name} is not in {self.cache}, and HF_HUB_OFFLINE forbids downloads"
                )
            return config.parent
        files = {one.rfilename: one for one in info.siblings or ()}
        if CONFIG not in files:
            advice = self._gguf_advice(files) or "transformers cannot load it"
            raise CheckpointError(f"{self.name} has no {CONFIG}: {advice}")
        directory = self._file(files[CONFIG], self.name.revision, info.sha).parent
        try:
            model_keys(read_hf_config(directory))  # check this before a large download
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        small = [name for name in files if name in _SMALL or _is_template(name)]
        weights = self._weights(files, info.sha)
        size = sum(files[name].size or 0 for name in weights)
        missing = [name for name in weights if self._held(name, info.sha) is None]
        if missing:
            get_logger().info(
                f"{self.name}: downloading {counted(len(missing), 'file')} of weights "
                f"({size / 1e6:,.0f} MB in all) from {self.endpoint} to {self.cache}"
            )
        for name in (*small, *weights):
            self._file(files[name], info.sha, info.sha)
        get_logger().info(f"{self.name} is commit {info.sha[:12]}, in {directory}")
        return directory

    def _info(self) -> Any:
        """Return the hub's list of the model's files, with the commit. If the hub cannot be reached but the
        model is in the cache, log a warning and return None."""
        api = self._hub.HfApi(endpoint=self.endpoint)
        try:
            with self._errors_as_ours():
                return api.model_info(self.name.repo, revision=self.name.revision, files_metadata=True)
        except _UnreachableHubError as error:
            if self._held(CONFIG, self.name.revision) is None:
                raise
            get_logger().warning(f"{error}; using the files in the cache")
            return None

    def _weights(self, files: Mapping[str, Any], commit: str) -> list[str]:
        for index, single in ((INDEX, SINGLE), (PICKLE_INDEX, PICKLE)):
            if index in files:
                return [index, *self._shards(files, index, commit)]
            if single in files:
                return [single]
        others = sorted({Path(name).suffix for name in files if Path(name).suffix in _OTHER_WEIGHTS})
        has = f" (it has {', '.join(others)})" if others else ""
        advice = self._gguf_advice(files)
        raise CheckpointError(
            f"{self.name} has neither {SINGLE} nor {PICKLE}{has}" + (f": {advice}" if advice else "")
        )

    def _gguf_advice(self, files: Mapping[str, Any]) -> str | None:
        """Say how to use a GGUF file of the model. Returns None if it has none."""
        ggufs = sorted(name for name in files if name.endswith(".gguf"))
        if not ggufs:
            return None
        at = "" if self.name.revision == DEFAULT_REVISION else f" --revision {self.name.revision}"
        others = f" (or another of its {len(ggufs)} files)" if len(ggufs) > 1 else ""
        return (
            f"for a GGUF file{others}, run `hf download {self.name.repo} {ggufs[0]}{at} --local-dir .`, and "
            f"write {ggufs[0]} in place of {self.name}"
        )

    def _shards(self, files: Mapping[str, Any], index: str, commit: str) -> list[str]:
        where = read_json(self._file(files[index], commit, commit)).get("weight_map")
        names = sorted({str(name) for name in where.values()}) if isinstance(where, dict) else []
        for name in names:
            if name not in files:
                raise CheckpointError(f"{self.name}: {index} names {shown(name)}, which does not exist")
        return names

    def _file(self, wanted: Any, revision: str, commit: str) -> Path:
        """Return the path of a file in the cache. If it is not there, download it, and check its size and
        hash.

        Args:
            wanted: the hub's entry for the file.
        """
        name = wanted.rfilename
        held = self._held(name, commit)
        with self._errors_as_ours(name):
            path = Path(
                self._hub.hf_hub_download(
                    self.name.repo, name, revision=revision, cache_dir=self.cache, endpoint=self.endpoint
                )
            )
        if held is None and (problem := _difference(path, wanted)) is not None:
            for file in {path.resolve(), path}:  # remove the blob and the link to it
                file.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self.name}: {name} was damaged by the download and deleted: {problem}. Try again; if the "
                f"error persists, something between here and {self.endpoint} changes files"
            )
        return path

    def _held(self, name: str, revision: str) -> Path | None:
        found = self._hub.try_to_load_from_cache(
            self.name.repo, name, cache_dir=self.cache, revision=revision
        )
        return Path(found) if isinstance(found, str) else None

    @contextmanager
    def _errors_as_ours(self, file: str | None = None) -> Iterator[None]:
        errors, what = self._errors, str(self.name) if file is None else f"{self.name}: {file}"
        login = "log in with `hf auth login`, or set HF_TOKEN"
        page = f"{self.endpoint}/{self.name.repo}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise CheckpointError(
                f"{what} is gated: its owner must grant you access. Request it on {page}, then {login}"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"there is no model {self.name.repo} on {self.endpoint}, or it is private. If it is yours, "
                f"{login}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointError(
                f"{self.name.repo} has no revision {self.name.revision}; see {page}"
            ) from error
        except (errors.HTTPError, OSError) as error:
            response = getattr(error, "response", None)  # None: no connection
            if response is None:
                raise _UnreachableHubError(
                    f"{what} could not be downloaded from {self.endpoint}: {_cause(error)}"
                ) from error
            answer = f"{self.endpoint} answered HTTP {response.status_code} when asked for {what}"
            if response.status_code in (401, 403):
                raise CheckpointError(f"{answer}. Look at {page}, and {login}") from error
            raise _UnreachableHubError(answer) from error


class _UnreachableHubError(CheckpointError):
    """The connection to the hub failed, or the hub answered with an unexpected HTTP error."""


_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".bin", ".safetensors")


def _is_template(name: str) -> bool:
    directory, _, file = name.rpartition("/")
    return directory == NAMED_TEMPLATES and file.endswith(".jinja")


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None and not isinstance(error.__cause__, UserError):
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _difference(path: Path, wanted: Any) -> str | None:
    """Check the size and hash of a downloaded file. Returns a description of the first difference; None if
    there is none.

    Args:
        wanted: the hub's entry for the file, with the expected size and hash.
    """
    size = path.stat().st_size
    if wanted.size is not None and size != wanted.size:
        return f"it has {size:,} bytes, and the hub says {wanted.size:,}"
    if wanted.lfs is not None:
        digest, expected, kind = hashlib.sha256(), wanted.lfs.sha256, "SHA-256"
    elif wanted.blob_id:
        digest, expected, kind = hashlib.sha1(usedforsecurity=False), wanted.blob_id, "hash in git"
        digest.update(b"blob %d\0" % size)
    else:
        return None
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    found = digest.hexdigest()
    return (
        None if found == expected else f"its {kind} is {found[:12]}..., and the hub says {expected[:12]}..."
    )
