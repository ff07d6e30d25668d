"""Registries map names in a configuration to parts of the program, such as optimizers and datasets.

There is one :class:`Registry` for each kind of part, in ``ppfleetx/config/registries.py``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Protocol, TypeVar, overload

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ppfleetx.config.errors import ConfigError, shown

TargetT = TypeVar("TargetT")
TraitsT = TypeVar("TraitsT")
PartT = TypeVar("PartT")

PLUGINS_VARIABLE = "PPFLEETX_PLUGINS"
imported_plugins: dict[str, None] = {}
"""The plugins that the user has named and that have been imported, in the order in which the user gave them.
Only the command line and the environment can name a plugin, because importing it runs its code."""


@dataclass(frozen=True)
class Entry(Generic[TraitsT]):
    """A registered part and its traits. ``target`` is the part itself, or the string
    ``package.module:attribute`` that names it."""

    target: Any
    traits: TraitsT


class Registry(Generic[TargetT, TraitsT]):
    """All registered parts of one kind, such as all optimizers, by name.

    Looking up an unknown name raises a ConfigError.

    Args:
        what: the kind of part, for messages: ``an optimizer``.
        key: the configuration key whose value is the name of such a part.
        default: the traits of a part that is registered without traits.
    """

    def __init__(self, what: str, key: str, default: TraitsT) -> None:
        self.what, self.key, self._default = what, key, default
        self._entries: dict[str, Entry[TraitsT]] = {}

    @overload
    def register(self, name: str, target: str, *, traits: TraitsT | None = None) -> str: ...

    @overload
    def register(
        self, name: str, target: None = None, *, traits: TraitsT | None = None
    ) -> Callable[[PartT], PartT]: ...

    def register(self, name: str, target: Any = None, *, traits: TraitsT | None = None) -> Any:
        """Register a part, such as an optimizer class, under a name. Without ``target`` this is a decorator.

        Args:
            target: the part, or the string ``package.module:attribute`` that names it.
            traits: properties of the part that must be known before it is imported.

        Raises:
            ConfigError: the name is taken or has spaces, or the traits are of the wrong type.
        """
        if target is None:
            return lambda part: self.register(name, part, traits=traits) and part
        if not isinstance(name, str) or not name or name != "".join(name.split()):
            raise ConfigError(f"{self.what} needs a name without spaces, not {name!r}")
        if traits is not None and not isinstance(traits, type(self._default)):
            raise ConfigError(
                f"{self.what} has traits of the type {type(self._default).__name__}; "
                f"{name} was given {type(traits).__name__}"
            )
        entry = Entry(target, self._default if traits is None else traits)
        if self._entries.setdefault(name, entry) != entry:
            raise ConfigError(f"{self.what} named {name} is registered already; give yours another name")
        return target

    def names(self) -> tuple[str, ...]:
        """All registered names, in the order of registration."""
        return tuple(self._entries)

    def traits(self, name: str) -> TraitsT:
        """The traits of the part registered as ``name``. Nothing is imported."""
        return self._entry(name).traits

    def target(self, name: str) -> Any:
        """What was registered as ``name``: a class or function, or a string ``package.module:attribute`` that
        names one. Nothing is imported."""
        return self._entry(name).target

    def is_built_in(self, name: str) -> bool:
        """Whether the part registered as ``name`` is this package's own, and not a plugin's."""
        return str(self.target(name)).startswith("ppfleetx.")

    def load(self, name: str) -> TargetT:
        """Return the class or function registered as ``name``. If a string ``package.module:attribute`` was
        registered, the object that it names is imported."""
        return load_target(self._entry(name).target)

    def make(self, name: str, *arguments: Any, gives: type | None = None) -> Any:
        """Call the part registered as ``name`` with ``arguments``, and return the result, e.g. an optimizer
        object.

        Raises:
            ConfigError: there is no such part, it refuses the arguments, or its result is not of type
                ``gives``.
        """
        part = self.load(name)
        self._check_call(name, part, *arguments)
        if inspect.isabstract(part):
            lacks = ", ".join(sorted(part.__abstractmethods__))
            raise self._unfit(name, f"lacks {lacks}")
        result = part(*arguments)
        if gives is not None and not isinstance(result, gives):
            members = (*inspect.get_annotations(gives), *vars(gives)) if Protocol in gives.__bases__ else ()
            absent = ", ".join(m for m in members if not m.startswith("_") and not hasattr(result, m))
            raise self._unfit(
                name,
                f"must return an object of the type {gives.__name__}. It returned {shown(result)}, of type "
                f"{type(result).__name__}" + (f", which lacks {absent}" if absent else ""),
            )
        return result

    def _check_call(self, name: str, part: Any, *arguments: Any) -> None:
        try:
            inspect.signature(part).bind(*arguments)
        except ValueError:  # a function written in C may not show its arguments
            return
        except TypeError as error:
            given = ", ".join(type(value).__name__ for value in arguments)
            raise self._unfit(name, f"is called with ({given}) and does not take that: {error}") from None

    def _unfit(self, name: str, which: str) -> ConfigError:
        what = _described(self.load(name))
        return ConfigError(f"was registered as {what}, which {which}", key=self.key, value=name)

    def choices(self) -> str:
        """Return all registered names as a phrase for messages: ``one of A, B``."""
        names = self.names()
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"

    def hint(self, name: str) -> str:
        """Return advice about an unknown name: similar names, and the option ``--plugin``."""
        near = difflib.get_close_matches(name, self.names(), n=2, cutoff=0.6)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        return f"({meant}a name of your own is known when --plugin names the module that registers it)"

    def _entry(self, name: str) -> Entry[TraitsT]:
        if name not in self._entries:
            raise ConfigError(f"must be {self.choices()} {self.hint(name)}", key=self.key, value=name)
        return self._entries[name]


@dataclass(frozen=True)
class Registered:
    """Annotation of a field that must hold a name in ``registry``: ``Annotated[str, Registered(NORMS)]``."""

    registry: Registry[Any, Any]

    @property
    def words(self) -> str:
        return self.registry.choices()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, core_schema.str_schema(strict=True))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # Editors complete the built-in names, and accept others.
        return {"anyOf": [{"enum": list(self.registry.names())}, {"type": "string"}]}

    def _known(self, name: str) -> str:
        if name not in self.registry.names():
            raise ValueError(self.registry.hint(name))
        return name


def _described(part: Any) -> str:
    """Return ``package.module.Part`` for a function or class, and the shortened ``repr`` of any other
    ``part``."""
    if not hasattr(part, "__qualname__"):
        return shown(part)
    return f"{part.__module__}.{part.__qualname__}"


def load_target(target: Any) -> Any:
    """Import and return the object that ``target`` names in the form ``package.module:attribute``. If
    ``target`` is not a string, it is returned unchanged.

    Raises:
        ConfigError: there is no such module or attribute, or the string has another form.
        ModuleNotFoundError: a library that the module needs is not installed.
    """
    if not isinstance(target, str):
        return target
    module, colon, path = target.partition(":")
    if not module or not colon or not path:
        raise ConfigError(f"{target!r} is not of the form package.module:attribute")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"there is no module {error.name}, which was registered as {target!r}") from None
    except AttributeError:
        raise ConfigError(f"the module {module} has no {path}, which was registered as {target!r}") from None
