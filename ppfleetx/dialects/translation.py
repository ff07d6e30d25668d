"""Translate the options of another toolkit to ppfleetx's configuration, with a key table and rules.

Error messages name an option as the user wrote it, with its position: the file and line, or the number of the
command-line argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import yaml

from ppfleetx.config.errors import ConfigError, shown, shown_key
from ppfleetx.config.reading.tree import Node, nested, node_of, put
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.dialects.key_tables import Key, KeyTable, Kind, choice, flag, integer, number
from ppfleetx.dialects.user_options import UserOption

DEFAULT = "its default"
"""The comment in the YAML output for a value that is the toolkit's default."""


@dataclass(frozen=True)
class Native:
    """A translated value of ppfleetx's configuration.

    Attributes:
        value: the plain Python value.
        origins: the user's values from which this value was derived.
        why: an explanation for the comment in the YAML output.
    """

    value: Any
    origins: tuple[UserOption, ...] = ()
    why: str = ""

    @property
    def place(self) -> str:
        return "; ".join(one.origin for one in self.origins) or f"not written; {self.why}"

    @property
    def comment(self) -> str:
        """The comment on this value in the YAML output: the user's values from which it was derived, and an
        explanation if there is one."""
        return "; ".join([*(one.origin for one in self.origins), *filter(None, [self.why])])


@dataclass
class Translation:
    """A configuration of another toolkit, translated to ppfleetx's configuration.

    Methods such as :meth:`integer` and :meth:`flag` read one option. They return ``default`` if the option is
    missing or has no value, and raise ConfigError if its value has the wrong type.

    Attributes:
        dialect: the toolkit's name, such as "MindFormers".
        place: the file or command line that was translated.
        native: the values of ppfleetx's configuration, by dotted key.
        fixed: options of ``Kind.FIXED`` that the user gave: ppfleetx has only one behavior for them.
        unused: options of ``Kind.UNUSED`` that the user gave: ppfleetx has nothing that corresponds to them.
        notes: messages to log about what ppfleetx deliberately does differently from the toolkit.
        given: all options that the user gave, by the option's name in the key table.
        world_size: the number of processes of the job; None if unknown.
    """

    dialect: str
    place: str
    native: dict[str, Native] = field(default_factory=dict)
    fixed: list[UserOption] = field(default_factory=list)
    unused: list[UserOption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: dict[str, UserOption] = field(default_factory=dict)
    world_size: int | None = None

    def put(self, key: str, value: Any, *sources: str | UserOption, why: str = "") -> None:
        """Set the key ``key`` of ppfleetx's configuration. A ``value`` of None leaves the key unset. Raises
        ConfigError if the key already has another value.

        Args:
            sources: the user's options, or names of options, from which the value was derived. Names of
                options that the user did not give are ignored; if the user gave none of them, the value
                counts as the toolkit's default.
            why: an explanation for the comment in the YAML output.
        """
        if value is None:
            return
        new, known = Native(value, self._given(sources), why), self.native.get(key)
        if sources and not new.origins:  # the user gave none of these options
            new = replace(new, why=why or DEFAULT)
        if known is not None:
            if known.value != value:
                rule = f"says {shown(value)} ({new.place}) and {shown(known.value)} ({known.place}); give one"
                raise ConfigError(rule, key=key)
            more = (one for one in new.origins if one not in known.origins)
            new = replace(new, origins=(*known.origins, *more))
        self.native[key] = new

    def replace(self, key: str, value: Any, *sources: str | UserOption, why: str = "") -> None:
        """Set the key ``key`` of ppfleetx's configuration, and discard any earlier value. A ``value`` of None
        leaves the key unset.

        Args:
            sources: the user's options, or names of options, from which the value was derived.
            why: an explanation for the comment in the YAML output.
        """
        self.native.pop(key, None)
        self.put(key, value, *sources, why=why)

    def put_precision(self, dtype: str, *sources: str | UserOption, on_cpu: bool) -> None:
        """Set the run's compute type to ``dtype``, which is ``float16`` or ``bfloat16``. With ``on_cpu``, the
        run computes in float32 if the CPU does not support the type."""
        enable, why = ("auto", "a CPU that supports the type; else float32") if on_cpu else (True, "")
        self.put("Engine.mix_precision.enable", enable, *sources, why=why)
        self.put("Engine.mix_precision.dtype", dtype, *sources)

    def put_null(self, key: str, *sources: str | UserOption, why: str = "") -> None:
        """Set the key ``key`` of ppfleetx's configuration to null. Use this for keys whose default is not
        null."""
        self.native[key] = Native(None, self._given(sources), why)

    def _given(self, sources: Sequence[str | UserOption]) -> tuple[UserOption, ...]:
        return tuple(
            one
            for source in sources
            for one in (self.origins(source) if isinstance(source, str) else (source,))
        )

    def __contains__(self, key: str) -> bool:
        return key in self.given and self.given[key].value is not None

    def origins(self, *keys: str) -> tuple[UserOption, ...]:
        """Return the options in ``keys`` that the user gave, in the order of ``keys``."""
        return tuple(self.given[key] for key in keys if key in self)

    def first(self, *keys: str) -> str:
        """Return the first option of ``keys`` that the user gave, or the last of ``keys`` if the user gave
        none."""
        return next((key for key in keys if key in self), keys[-1])

    def value(self, key: str, default: Any = None) -> Any:
        return self.given[key].value if key in self else default

    def integer(self, key: str, default: Any = None, *, least: int | None = None) -> Any:
        """Return the user's value of the option ``key``, which must be an integer. ``least`` is the smallest
        allowed value."""
        return self.read(key, default, partial(integer, least=least))

    def number(self, key: str, default: Any = None, *, least: float | None = None) -> Any:
        """Return the user's value of the option ``key``, which must be a finite number. ``least`` is the
        smallest allowed value."""
        return self.read(key, default, lambda value: float(number(value, least=least)))

    def flag(self, key: str, default: Any = None) -> Any:
        """Return the user's value of the option ``key``, which must be true or false."""
        return self.read(key, default, flag)

    def choice(self, key: str, choices: Iterable[Any], default: Any = None) -> Any:
        """Return the user's value of the option ``key``, which must be one of ``choices``."""
        return self.read(key, default, choice({one: one for one in choices}))

    def read(self, key: str, default: Any, convert: Callable[[Any], Any]) -> Any:
        """Return the user's value of the option ``key``, converted with ``convert``. A ValueError of
        ``convert`` becomes a ConfigError."""
        if key not in self:
            return default
        try:
            return convert(self.given[key].value)
        except ValueError as error:
            raise self.error(key, str(error)) from None

    def text(self, key: str, default: Any = None) -> Any:
        """Return the user's value of the option ``key`` as a string, exactly as the user wrote it. Raises
        ConfigError if the string is empty, or if the value is not a plain scalar."""
        if key not in self:
            return default
        one = self.given[key]
        value = one.value if isinstance(one.value, str) or one.text is None else one.text
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, "must be a text")
        return value

    def error(self, key: str, rule: str) -> ConfigError:
        """Return a ConfigError about an option that the user gave. The message shows the option's value and
        where it was written."""
        return self.given[key].error(rule)

    def conflict(self, keys: Sequence[str], rule: str) -> ConfigError:
        """Return a ConfigError about several options that contradict each other. For each of ``keys`` that
        the user gave, the message shows the value and where it was written."""
        first, *others = self.origins(*keys)
        also = ", ".join(f"{one.key} = {shown(one.value)} ({one.place})" for one in others)
        return ConfigError(
            rule, key=first.key, value=first.value, place=first.place, hint=f"[with {also}]" if also else None
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The messages to log: :attr:`notes`, and one message that lists the options in :attr:`unused`."""
        names = ", ".join(dict.fromkeys(one.key for one in self.unused))
        line = [f"keys of {self.dialect} that have no meaning here: {names}"] if names else []
        return (*self.notes, *line)

    def tree(self) -> Node:
        """Return the translated configuration as a tree for the configuration loader. Each value in the tree
        carries the file and line where the user wrote it, so the loader's error messages can name them."""
        root = Node({}, self.place)
        for key, native in self.native.items():
            node = node_of(native.value, native.place)
            node.text = _as_written(native) or node.text
            put(root, key.split("."), node)
        return root

    def yaml(self) -> str:
        """Return the translated configuration as YAML, with comments that say where each value came from."""
        return "\n".join([*self._head(), *_yaml_lines(self.native)]) + "\n"

    def _head(self) -> Iterator[str]:
        yield f"# Translated from {self.dialect}: {_one_line(self.place)}."
        for note in self.notes:
            yield f"# {_one_line(note)}"
        for words, keys in (
            ("Without effect, because always so here", [one.key for one in self.fixed]),
            ("Without meaning here", [one.key for one in self.unused]),
        ):
            if keys:
                yield _one_line(f"# {words}: {', '.join(dict.fromkeys(keys))}")


def _as_written(native: Native) -> str | None:
    """Return the characters that the user wrote for a value, such as ``007`` for 7. Returns None for a
    string, for a value that the translation changed, and for a value that does not come from exactly one
    option."""
    if len(native.origins) != 1 or isinstance(native.value, str):
        return None
    one = native.origins[0]
    return one.text if type(one.value) is type(native.value) and one.value == native.value else None


def _yaml_lines(native: dict[str, Native]) -> Iterator[str]:
    """Yield the lines of the configuration ``native`` in YAML, with sections in the order of the
    documentation."""
    order = {name: index for index, name in enumerate(RunConfig.model_fields)}
    keys = sorted(native, key=lambda name: order.get(name.split(".")[0], len(order)))
    yield from _block(nested((key, native[key]) for key in keys), "")


def _block(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Native):
            comment = _one_line(value.comment)
            text = _as_written(value) or _flow(value.value)
            yield f"{indent}{key}: {text}" + (f"  # {comment}" if comment else "")
        else:
            yield f"{indent}{key}:"
            yield from _block(value, f"{indent}  ")


def _flow(value: Any) -> str:
    plain = [list(value)] if isinstance(value, tuple) else [value]
    return yaml.safe_dump(plain, default_flow_style=True, width=1 << 30, allow_unicode=True).strip()[1:-1]


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


Rule = Callable[[Translation], None]
"""A function that translates options that depend on each other. It reads the user's options from a
translation, and sets keys of ppfleetx's configuration in the translation."""


def translate(
    dialect: str,
    place: str,
    given: Iterable[UserOption],
    table: KeyTable,
    rules: Sequence[Rule] = (),
    world_size: int | None = None,
) -> Translation:
    """Translate the user's options to ppfleetx's configuration. First ``table`` translates each option by
    itself, then ``rules`` translate options that depend on each other. If ``given`` contains an option
    several times, the last value is used. ``world_size`` is the number of processes; None if unknown. Raises
    ConfigError for unknown and unsupported options."""
    result = Translation(dialect, place, world_size=world_size)
    found: dict[str, tuple[UserOption, Key]] = {}
    unknown: list[UserOption] = []
    for one in given:
        key = table.find(one.key)
        if key is None:
            if one.value is not None or not table.is_block(one.key):  # an empty block is allowed
                unknown.append(one)
            continue
        name = one.key if "*" in key.name else key.name
        found.pop(name, None)
        found[name] = (one, key)
    _refuse_unsupported(found, table)
    if unknown:
        raise _unknown(unknown, table, dialect)
    for name, (one, key) in found.items():
        result.given[name] = one
        if one.value is not None:
            take(one, key, result)
    for key in table.keys:
        if key.default is not None and not any(native in result.native for native in key.to):
            for native, value in key.convert_value(key.default).items():
                result.put(native, value, why=DEFAULT)
    for rule in rules:
        rule(result)
    return result


def _refuse_unsupported(found: Mapping[str, tuple[UserOption, Key]], table: KeyTable) -> None:
    """Raise ConfigError if the user gave an option of ``Kind.REFUSED``, or an option of ``Kind.FIXED`` with a
    value that is not in ``Key.accepts``. If there are several, the error names the one that comes first in
    the key table."""
    given = {key.name: one for one, key in found.values() if one.value is not None}
    for key in table.keys:
        if key.name in given and key.kind is Kind.REFUSED:
            raise given[key.name].error(key.says)
        if key.name in given and key.kind is Kind.FIXED:
            _check_fixed(given[key.name], key)


def _unknown(unknown: Sequence[UserOption], table: KeyTable, dialect: str) -> ConfigError:
    """Return a ConfigError about the first of the ``unknown`` options, which names the others, too."""
    one = unknown[0]
    if table.is_block(one.key):
        return one.error("must be a mapping of keys")
    others = ", ".join(shown_key(other.key) for other in unknown[1:] if not table.is_block(other.key))
    hint = table.nearest(one.key)
    return ConfigError(
        f"{dialect} has no such key, or this program does not know it.",
        key=one.key,
        place=one.place,
        hint=f"{hint} Also unknown: {others}" if others else hint,
    )


def take(one: UserOption, key: Key, result: Translation) -> None:
    if key.kind is Kind.UNUSED:
        result.unused.append(one)
    elif key.kind is Kind.FIXED:
        result.fixed.append(one)
    elif key.convert is not None:
        try:
            natives = key.convert_value(one.value)
        except ValueError as error:
            raise one.error(str(error)) from None
        for native, value in natives.items():
            result.put(native, value, one)


def _check_fixed(one: UserOption, key: Key) -> None:
    accepts = key.accepts
    if accepts is None or any(type(one.value) is type(value) and one.value == value for value in accepts):
        return
    raise one.error(f"can only be {' or '.join(map(shown, accepts))}: {key.says}")
