"""Names of parts: registered, refused with the nearest, known to the configuration and to editors."""

from __future__ import annotations

import abc
import sys
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest

from ppfleetx.config import loader, registries
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.registry import Registry, load_target
from tools.gen_config_docs import json_schema

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"
ALL = [value for value in vars(registries).values() if isinstance(value, Registry)]


@pytest.fixture
def colours() -> Registry:
    registry: Registry = Registry("a colour", "Paint.colour", 0)
    registry.register("red", "os.path:join", traits=7)

    @registry.register("green")
    def green() -> str:
        return "green"

    return registry


def test_parts_are_found_by_name(colours: Registry) -> None:
    assert colours.names() == ("red", "green")
    assert colours.load("red") is __import__("os").path.join and colours.traits("red") == 7
    assert colours.load("green")() == "green" and colours.traits("green") == 0


def test_what_cannot_be_registered_or_found_is_said_in_words(colours: Registry) -> None:
    with pytest.raises(
        ConfigError, match=r"Paint\.colour = 'gren': must be one of red, green \(did you mean"
    ):
        colours.load("gren")
    with pytest.raises(ConfigError, match="a colour named red is registered already"):
        colours.register("red", "os:sep")
    colours.register("red", "os.path:join", traits=7)  # the same again is nothing new
    for wrong in ("", "light red"):
        with pytest.raises(ConfigError, match="needs a name without spaces"):
            colours.register(wrong, "os:sep")
    for wrong in ("os", "os:", ":sep"):
        with pytest.raises(ConfigError, match=r"package\.module:attribute"):
            load_target(wrong)
    with pytest.raises(ConfigError, match="the module os has no nothing"):
        load_target("os:nothing")
    with pytest.raises(
        ConfigError, match=r"there is no module os\.way, which was registered as 'os\.way:out'"
    ):
        load_target("os.way:out")
    with pytest.raises(ConfigError, match="a colour has traits of the type int; blue was given str"):
        colours.register("blue", "os:sep", traits="deep")


class Abstract(abc.ABC):
    @abc.abstractmethod
    def mix(self) -> None:
        """Nothing ships that does this."""


def test_a_part_that_is_not_what_its_place_needs_is_refused(colours: Registry) -> None:
    for name, part in {"none": lambda base: None, "three": 3, "abstract": Abstract}.items():
        colours.register(name, part)
    assert colours.make("green", gives=str) == "green"
    assert colours.make("none", 1) is None
    where = r"Paint\.colour = "
    with pytest.raises(
        ConfigError,
        match=where + r"'none'.*must return an object of the type str\. It returned None, of type NoneType",
    ):
        colours.make("none", 1, gives=str)
    with pytest.raises(ConfigError, match=where + r"'green'.*green, which is called with \(int\).*too many"):
        colours.make("green", 1)
    with pytest.raises(ConfigError, match=where + r"'three': was registered as 3.*not a callable"):
        colours.make("three")
    with pytest.raises(ConfigError, match=where + r"'abstract'.*Abstract, which lacks mix"):
        colours.make("abstract")


class Pot(Protocol):
    """What a colour may have to be."""

    size: int

    def mix(self) -> None: ...


def test_what_a_part_lacks_is_named(colours: Registry) -> None:
    with pytest.raises(ConfigError, match=r"an object of the type Pot\..*which lacks size, mix$"):
        colours.make("green", gives=runtime_checkable(Pot))


@pytest.mark.parametrize("names", ["weight", ("gain",), ("weight", "scale")])
def test_a_norm_has_weight_and_bias(names: Any) -> None:
    with pytest.raises(ConfigError, match=r"NormTraits\(parameters=.*must be a tuple"):
        registries.NormTraits(parameters=names)


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.key)
def test_everything_that_ships_is_where_its_entry_says(registry: Registry) -> None:
    assert registry.names()
    assert all(registry.load(name) is not None for name in registry.names())


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(NANO, ["Engine.callbacks=[default, {name: metrcs}]"])
    said = str(caught.value)
    assert "Engine.callbacks.1.name = 'metrcs'" in said and "did you mean metrics?" in said
    assert "-o override 1" in said and "--plugin" in said


def test_what_a_callback_may_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.0 = 3.*must be a name, or a mapping with name"):
        load_config(NANO, ["Engine.callbacks=[3]"])


def test_editors_offer_the_names_that_ship_and_take_others() -> None:
    schema = json_schema()["$defs"]
    names = {"anyOf": [{"enum": list(registries.CALLBACKS.names())}, {"type": "string"}]}
    assert schema["CallbackConfig"]["properties"]["name"]["anyOf"] == names["anyOf"]
    assert names in schema["EngineConfig"]["properties"]["callbacks"]["items"]["anyOf"]


def test_a_file_names_no_plugin_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = NANO.read_text()
    assert text.count("Global:\n") == 1
    config = tmp_path / "config.yaml"
    config.write_text(text.replace("Global:\n", "Global:\n  plugins: [mine.parts, os]\n"))
    with pytest.raises(ConfigError, match=r"config\.yaml:\d+.*the plugin mine\.parts.*--plugin mine\.parts"):
        load_config(config)
    assert "mine" not in sys.modules
    monkeypatch.setattr(loader, "imported_plugins", {"mine.parts": None, "more": None})
    assert load_config(config).Global.plugins == ("mine.parts", "os", "more")


def test_a_data_set_of_ones_own_says_how_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries.DATASETS, "_entries", {**registries.DATASETS._entries})
    for name, shuffled in {"Mine": True, "Ordered": False}.items():
        traits = registries.DatasetTraits(shuffled=shuffled, options=("size",))
        registries.DATASETS.register(name, "os:sep", traits=traits)
        given = [f"Data.Train.dataset.name={name}", "Data.Train.dataset.split=x"]
        train = load_config(NANO, [*given, "Data.Train.dataset.options.size=3"]).Data.Train
        assert not train.dataset.is_corpus and not train.dataset.is_texts
        assert train.shuffles_for_training == shuffled
        with pytest.raises(ConfigError, match=f"{name} has no option length; it takes size"):
            load_config(NANO, [*given, "Data.Train.dataset.options.length=3"])
    with pytest.raises(ConfigError, match="GPTDataset has no option size; it takes none"):
        load_config(NANO, ["Data.Train.dataset.options.size=3"])


def test_a_groups_own_optimizer_has_options_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries.OPTIMIZERS, "_entries", {**registries.OPTIMIZERS._entries})
    traits = registries.OptimizerTraits(states=1, options=("nu",))
    registries.OPTIMIZERS.register("Mine", "os:sep", traits=traits)
    group = "Optimizer.groups=[{kinds: [bias], optimizer: Mine}]"
    assert load_config(NANO, [group, "Optimizer.options.nu=0.5"]).Optimizer.options == {"nu": 0.5}
    with pytest.raises(ConfigError, match="AdamW or Mine has no option mu; it takes nu"):
        load_config(NANO, [group, "Optimizer.options.mu=0.5"])
    with pytest.raises(ConfigError, match="AdamW has no option nu; it takes none"):
        load_config(NANO, ["Optimizer.options.nu=0.5"])
