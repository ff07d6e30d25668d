"""The key table of MindSpeed-Core-MS: Megatron's arguments under other names, and its own keys."""

from __future__ import annotations

from dataclasses import replace

from ppfleetx.dialects.given import normal_name
from ppfleetx.dialects.keys import Key, KeyTable, nearest_names, read_file, tables_of
from ppfleetx.dialects.megatron.dialect import ALL_KEYS, TABLES

LLM, PRECISION = "model_config.llm", "accelerate_config.precision"
_FILE = read_file("mindspeed")
OWN = tables_of(_FILE)["own"]
_SECTIONS = {
    "model_config": "model experts recomputation",
    "model_config.moe_config": "experts",
    "training_config": "training profiler parallelism others",
    "dataset_config": "data",
    "optimizer_config": "optimizer training parallelism others",
    "parallel_config": "parallelism recomputation",
}  # for each section, the tables of Megatron whose keys it may contain
# The sections of the example's train_config block may also be at the top level.
_PREFIXES = ("train_config.ms_training_config.", "train_config.")


def _megatron_names() -> dict[str, str]:
    return {
        f"{section}.{key.name}": key.name
        for section, tables in _SECTIONS.items()
        for table in tables.split()
        for key in TABLES[table]
    }


ALIASES: dict[str, str] = _megatron_names() | _FILE["aliases"]
"""The argument of Megatron for each dotted name of MindSpeed-Core-MS with the same meaning."""


def plain(name: str) -> str:
    """Remove the ``train_config`` block around a section, or around training keys, from ``name``."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.split(".")[0] in _SECTIONS else f"training_config.{rest}"
    return name


class _Names(KeyTable):
    """Keys under their names in MindSpeed-Core-MS, or under Megatron's names if they are outside sections."""

    def __init__(self) -> None:
        own = {key.name for key in OWN}
        super().__init__([*OWN, *ALL_KEYS.keys])
        self._names = [*own, *(name for name in ALIASES if name not in own)]
        self._own = own

    def find(self, name: str) -> Key | None:
        name = plain(name)
        if name in self._own:
            return super().find(name)
        if name in ALIASES:
            return super().find(ALIASES[name])
        return super().find(name) or (None if "." in name else super().find(normal_name(name)))

    def is_block(self, name: str) -> bool:
        prefix = f"{plain(name)}."
        in_train = name == "train_config" or plain(name) in ("training_config.ms_training_config",)
        return in_train or super().is_block(name) or any(one.startswith(prefix) for one in self._names)

    def nearest(self, name: str) -> str:
        return nearest_names(plain(name), self._names)


TABLE = _Names()


def documented() -> dict[str, KeyTable]:
    """The tables of the page: for each block, Megatron's keys under their names here, and the other keys."""
    groups: dict[str, list[Key]] = {}
    own = {key.name: key for key in OWN}
    for name in [*(name for name in ALIASES if name not in own), *own]:
        key = own.get(name) or replace(ALL_KEYS.find(ALIASES[name]), name=name)
        groups.setdefault(name.split(".")[0], []).append(key)
    return {name: KeyTable(keys) for name, keys in groups.items()}
