"""Declare the options of a verb (subcommand) as fields of a dataclass, from which the command-line parser is
built."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from ppfleetx.config.errors import ConfigError

if TYPE_CHECKING:
    from ppfleetx.config.reading.overrides import Setting

_POSITIONAL = ""
CONFIG_HELP = "YAML configuration, a directory with a config.yaml, or a name that `ppfleetx configs` lists"


def imported(place: str) -> Any:
    """Import and return the class or function ``place``, given as ``module:name`` within
    ``ppfleetx.commands``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"ppfleetx.commands.{module}"), name)


class Command:
    """Base class of verbs (subcommands). A verb is a frozen dataclass: its fields are the command-line
    options, and its docstring is the description in ``--help``.

    Attributes:
        examples: example commands, shown at the end of ``--help``.
        intermixed: whether options may stand between positional arguments.
        program: the function that implements the verb, as ``module:function`` within ``ppfleetx.commands``.
            It is imported only when the verb runs, and is called with the options.
    """

    examples: ClassVar[str] = ""
    intermixed: ClassVar[bool] = False
    program: ClassVar[str]

    def run(self) -> int | None:
        """Run the verb (subcommand). Returns its exit code; None means 0."""
        imported(self.program)(self)
        return None

    def settings(self) -> list[Setting]:
        """Return the configuration values that the given options set. Options declared without a
        configuration ``key`` set none."""
        from ppfleetx.config.reading.overrides import Setting

        found = []
        for one in fields(self):
            key, value = one.metadata["key"], getattr(self, one.name)
            if key is not None and value not in (None, ()):
                place = next(iter(flags_of(one)), one.metadata["how"].get("metavar"))
                found.append(Setting(key, value, place))
        return found

    @classmethod
    def parser(cls, program: str | None = None) -> argparse.ArgumentParser:
        """Build the argument parser of this verb (subcommand). ``program`` is the program's name in the usage
        line."""
        parser = argparse.ArgumentParser(
            prog=program,
            description=inspect.cleandoc(cls.__doc__ or ""),
            epilog=cls.examples or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        types, groups = get_type_hints(cls), {}
        for one in sorted(fields(cls), key=lambda one: bool(flags_of(one))):  # positional arguments first
            title = one.metadata["group"]
            if title is not None and title not in groups:
                groups[title] = parser.add_argument_group(title)
            target = parser if title is None else groups[title]
            target.add_argument(*(flags_of(one) or (one.name,)), **_argument(one, types[one.name]))
        return parser

    @classmethod
    def parse(cls, arguments: Sequence[str] | None, program: str | None = None) -> Self:
        """Parse command-line arguments (None: the arguments of this process) to an object of this class.
        Raises SystemExit if they are wrong or contain ``--help``."""
        parser = cls.parser(program)
        # parse_args needs all positional arguments in one place, so no prompt could follow an option.
        parse = parser.parse_intermixed_args if cls.intermixed else parser.parse_args
        given = vars(parse(arguments))
        return cls(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        )


def option(
    help: str | Callable[[], str],
    *flags: str,
    default: Any = None,
    key: str | None = None,
    group: str | None = None,
    **how: Any,
) -> Any:
    """Declare a field of a :class:`Command` as a command-line option. The option is named after the field:
    ``max_steps`` becomes ``--max-steps``.

    The field's type determines how the option is parsed: a ``bool`` takes no value, a ``Literal`` is a
    choice, and a tuple takes several words.

    Args:
        help: the text in ``--help``, or a function that returns it.
        flags: names to use instead of the field's name, such as ``-c`` and ``--config``.
        default: the default value; ``MISSING`` if the option is required.
        key: the configuration key that the option sets, if there is one.
        group: the title of the group in ``--help`` under which the option is listed.
        how: further arguments of ``ArgumentParser.add_argument``.
    """
    how["help"] = help
    return field(default=default, metadata={"flags": flags, "key": key, "group": group, "how": how})


def switch(help: str, *flags: str) -> Any:
    """Declare a field of a :class:`Command` as a command-line option without a value. The field is True if
    the option is given, else False. ``flags`` are names to use instead of the field's name."""
    return option(help, *flags, default=False)


def repeated(help: str, *flags: str, metavar: str) -> Any:
    """Declare a field of a :class:`Command` as a command-line option that may be repeated. Each use of the
    option adds one value, and the field is the tuple of all values. ``metavar`` is the name of a value in
    ``--help``."""
    return option(help, *flags, default=(), action="append", metavar=metavar)


def positional(metavar: str | None, help: str, **how: Any) -> Any:
    """Declare a field of a :class:`Command` as a positional argument. ``metavar`` is its name in ``--help``.
    ``how`` has further arguments of :func:`option`, such as ``key``."""
    return option(help, _POSITIONAL, metavar=metavar, **how)


def flags_of(one: Field[Any]) -> tuple[str, ...]:
    """Return the command-line names of a :class:`Command`'s field, such as ``-c`` and ``--config``. The tuple
    is empty for a positional argument.
    """
    flags = one.metadata["flags"] or (f"--{one.name.replace('_', '-')}",)
    return () if flags == (_POSITIONAL,) else flags


def positive_int(text: str) -> int | None:
    """Parse an integer of at least 1. Returns None if ``text`` is anything else."""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def whole_number(text: str) -> int:
    """Parse an integer of at least 1, as the ``type=`` of an option. Raises ArgumentTypeError for other
    text."""
    number = positive_int(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def _argument(one: Field[Any], annotation: Any) -> dict[str, Any]:
    flags, required, given = flags_of(one), one.default is MISSING, dict(one.metadata["how"])
    if callable(given["help"]):
        given["help"] = given["help"]()
    how: dict[str, Any] = {"dest": one.name, "required": required} if flags else {}
    if annotation is bool:
        return {**how, "action": "store_true", **given}
    how["default"] = None if required else one.default
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is tuple:
        annotation, *more = get_args(annotation)
        how["nargs"] = "+" if flags or required else "*"
        if more != [...]:
            how["nargs"] = 1 + len(more)
        elif given.get("action") == "append":
            del how["nargs"]
            how["default"] = list(one.default)
    elif not flags and not required:
        how["nargs"] = "?"
    if get_origin(annotation) is Literal:
        how["choices"] = get_args(annotation)
    elif annotation is not str:
        how |= {"type": annotation} | ({"metavar": "N"} if annotation is int else {})
    return {**how, **given}


def plugin_option() -> Any:
    """Declare the field ``plugin`` of a :class:`Command`: ``--plugin MODULE``, which may be repeated."""
    return repeated(
        "import a Python module of yours that registers callbacks, optimizers, layers, ...; may be given "
        "many times (PPFLEETX_PLUGINS=module,module does the same)",
        metavar="MODULE",
    )


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(Command):
    """Base class of verbs (subcommands) that work on a configuration. It has the option ``-c FILE``, and the
    options ``-o Section.key=value`` and ``--plugin MODULE``, which may be repeated."""

    config: str = option(CONFIG_HELP, "-c", "--config", default=MISSING, metavar="FILE")
    override: tuple[str, ...] = repeated(
        "replace one value of the configuration; may be given many times",
        "-o",
        "--override",
        metavar="Section.key=value",
    )
    plugin: tuple[str, ...] = plugin_option()


@dataclass(frozen=True, kw_only=True)
class OptionalConfigOptions(ConfigOptions):
    """Base class of verbs (subcommands) that have the options of :class:`ConfigOptions` but do not require
    ``-c``."""

    config: str | None = option(CONFIG_HELP, "-c", "--config", metavar="FILE")


def import_plugins(options: Command) -> None:
    """Import the modules that ``--plugin`` and the environment variable ``PPFLEETX_PLUGINS`` name. Does
    nothing if the verb has no option ``--plugin``. If ``-c`` is optional, the modules are imported only if
    ``-c`` or ``--plugin`` is given."""
    plugins = getattr(options, "plugin", None)
    if "" in (plugins or ()):
        raise ConfigError("must name a Python module", key="--plugin", value="")
    if plugins or (plugins == () and getattr(options, "config", True)):
        from ppfleetx.utils.plugins import import_named_plugins

        import_named_plugins(plugins)


def refuse_not_positive(options: Command, *names: str) -> None:
    """Raise ConfigError if an option in ``names`` is given and is not a finite number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError("must be greater than 0", key=f"--{name.replace('_', '-')}", value=value)
