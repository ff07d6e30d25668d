"""An invalid export directory is rejected with one sentence."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.deploy.export_dir import open_export
from tests.deploy.exports import Exported


@pytest.fixture
def copy(exported: Exported, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported.directory, tmp_path / "out" / "rank_0"))


def test_the_directory_or_the_one_it_is_in(copy: Path) -> None:
    directory, manifest = open_export(copy.parent)
    assert directory == copy
    assert open_export(copy) == (copy, manifest)
    assert manifest.checkpoint == "epoch_0_step_4"
    assert manifest.vocab_size == manifest.end_id + 1 == 271
    assert manifest.max_positions == manifest.model["max_position_embeddings"] == 64


def test_no_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Inference\.model_dir = .*nowhere': there is no such directory"):
        open_export(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no exported model"):
        open_export(tmp_path)
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "model.pdmodel").touch()
    with pytest.raises(ConfigError, match="program of PaddleFleetX"):
        open_export(tmp_path)


@pytest.mark.parametrize("name", ["model.json", "model.pdiparams", "tokenizer/tokenizer.json"])
def test_damage_is_found(copy: Path, name: str) -> None:
    path = copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: is damaged: its checksum"):
        open_export(copy)
    open_export(copy, verify=False)
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"{name}: is damaged: it has \d+ bytes instead of"):
        open_export(copy, verify=False)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{name}: is missing"):
        open_export(copy, verify=False)


def seal(content: dict) -> str:
    """The text of a manifest, with the checksum that belongs to it."""
    body = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(body | {"checksum": hashlib.sha256(text.encode()).hexdigest()})


def test_an_edited_manifest_is_found(copy: Path) -> None:
    path = copy / "export.json"
    text = path.read_text()
    manifest = json.loads(text)
    model = manifest["model"] | {"max_position_embeddings": 128}
    for change in ({"max_positions": 65}, {"model": model}, {"checksum": "0" * 64}, {"checksum": None}):
        path.write_text(json.dumps(manifest | change))
        with pytest.raises(ConfigError, match="is damaged or was edited: its checksum"):
            open_export(copy, verify=False)
    path.write_text(json.dumps(manifest, indent=4, sort_keys=True))  # the same, laid out in another way
    open_export(copy, verify=False)


def test_what_is_no_manifest_of_this_version(copy: Path) -> None:
    path = copy / "export.json"
    manifest = json.loads(path.read_text())
    for change, words in (
        ({"version": 1}, "is of format 'ppfleetx-export' 1, this version reads ppfleetx-export 2 and 3"),
        ({"format": "another"}, "is of format 'another' 3"),
        ({"surprise": 1}, "damaged: 'surprise' is unknown, missing or invalid"),
        ({"max_positions": "64"}, "damaged: 'max_positions' is unknown, missing or invalid"),
    ):
        path.write_text(seal(manifest | change))
        with pytest.raises(ConfigError, match=words):
            open_export(copy)
    for content in ("{", "[]", ""):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is not the manifest of an export"):
            open_export(copy)
    path.unlink()
    with pytest.raises(ConfigError, match=r"export\.json is missing"):
        open_export(copy)
