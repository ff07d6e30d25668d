"""A verb's options as a dataclass, and the command line that is made from it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from ppfleetx.config.reading.overrides import Setting

CONFIG_HELP = "YAML configuration, a directory with a config.yaml, or a name that `ppfleetx configs` lists"


class Command:
    """A verb: a frozen dataclass whose fields are its options and whose docstring opens ``--help``.

    Attributes:
        examples: commands that can be pasted; the end of ``--help``.
        intermixed: whether options may stand between positional arguments.
    """

    examples: ClassVar[str] = ""
    intermixed: ClassVar[bool] = False

    def run(self) -> int | None:
        """Do it; gives the exit code, None for 0.

        Raises:
            UserError: a mistake of the user.
        """
        raise NotImplementedError

    def settings(self) -> list[Setting]:
        """The values that options give to keys of the configuration."""
        from ppfleetx.config.reading.overrides import Setting

        found = []
        for one in fields(self):
            key, value = one.metadata["key"], getattr(self, one.name)
            if key is not None and value not in (None, ()):
                place = one.metadata["flags"][0] if one.metadata["flags"] else one.metadata["how"]["metavar"]
                found.append(Setting(key, value, place))
        return found

    @classmethod
    def parser(cls, program: str | None = None) -> argparse.ArgumentParser:
        """The command line; ``program`` stands after ``usage:``."""
        parser = argparse.ArgumentParser(
            prog=program,
            description=inspect.cleandoc(cls.__doc__ or ""),
            epilog=cls.examples or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        types, groups = get_type_hints(cls), {}
        for one in sorted(fields(cls), key=lambda one: bool(one.metadata["flags"])):  # positional ones first
            title = one.metadata["group"]
            if title is not None and title not in groups:
                groups[title] = parser.add_argument_group(title)
            target = parser if title is None else groups[title]
            name = one.metadata["flags"] or (one.name,)
            target.add_argument(*name, **_argument(one, types[one.name]))
        return parser

    @classmethod
    def parse(cls, arguments: Sequence[str] | None, program: str | None = None) -> Self:
        """The options that ``arguments`` (None: of this process) give.

        Raises:
            SystemExit: the arguments are wrong, or ``--help`` is among them.
        """
        parser = cls.parser(program)
        # The ordinary way takes all positional arguments from one place: no prompt could follow an option.
        parse = parser.parse_intermixed_args if cls.intermixed else parser.parse_args
        given = vars(parse(arguments))
        return cls(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        )


def option(
    *flags: str,
    help: str,
    default: Any = None,
    key: str | None = None,
    group: str | None = None,
    **how: Any,
) -> Any:
    """A field that ``flags`` give on the command line.

    Its type says what is read: a ``bool`` is a switch, a ``Literal`` a choice, a tuple takes several words.

    Args:
        flags: ``--name``, ...
        help: what ``--help`` says.
        default: ``MISSING`` where the option is required.
        key: the key of the configuration that the option sets.
        group: title of the group in ``--help``.
        how: further arguments of ``ArgumentParser.add_argument``.
    """
    how["help"] = help
    return field(default=default, metadata={"flags": flags, "key": key, "group": group, "how": how})


def positional(metavar: str, *, help: str, default: Any = None, **how: Any) -> Any:
    """A field that stands on the command line without a name; arguments as for :func:`option`."""
    return option(help=help, default=default, metavar=metavar, **how)


def whole_number(text: str) -> int:
    """1 or more, for ``type=``."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


def _argument(one: Field[Any], annotation: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` for a field."""
    flags, required = one.metadata["flags"], one.default is MISSING
    how: dict[str, Any] = {"dest": one.name, "required": required} if flags else {}
    if annotation is bool:
        return {**how, "action": "store_true", **one.metadata["how"]}
    how["default"] = None if required else one.default
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is tuple:
        annotation, *more = get_args(annotation)
        how["nargs"] = "+" if flags or required else "*"
        if more != [...]:
            how["nargs"] = 1 + len(more)
        elif one.metadata["how"].get("action") == "append":
            del how["nargs"]
            how["default"] = list(one.default)
    elif not flags and not required:
        how["nargs"] = "?"
    if get_origin(annotation) is Literal:
        how["choices"] = get_args(annotation)
    elif annotation is not str:
        how["type"] = annotation
    return {**how, **one.metadata["how"]}


def plugin_option() -> Any:
    """The field ``plugin``: any number of ``--plugin MODULE``, which :func:`import_plugins` imports."""
    return option(
        "--plugin",
        default=(),
        action="append",
        metavar="MODULE",
        help="import a Python module of yours that registers callbacks, optimizers, layers, ...; may be "
        "given many times (PPFLEETX_PLUGINS=module,module does the same)",
    )


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(Command):
    """``-c FILE``, and any number of ``-o Section.key=value`` and ``--plugin MODULE``."""

    config: str = option(
        "-c",
        "--config",
        default=MISSING,
        metavar="FILE",
        help=CONFIG_HELP,
    )
    override: tuple[str, ...] = option(
        "-o",
        "--override",
        default=(),
        action="append",
        metavar="Section.key=value",
        help="replace one value of the configuration; may be given many times",
    )
    plugin: tuple[str, ...] = plugin_option()


@dataclass(frozen=True, kw_only=True)
class OptionalConfigOptions(ConfigOptions):
    """The same for a verb that can do without ``-c``."""

    config: str | None = option("-c", "--config", metavar="FILE", help=CONFIG_HELP)


def import_plugins(options: Command) -> None:
    """Import the plugins of ``--plugin``, and the environment's where a configuration may use them."""
    from ppfleetx.utils.plugins import import_named_plugins

    plugins = getattr(options, "plugin", None)
    if plugins or (plugins == () and getattr(options, "config", True)):
        import_named_plugins(plugins)
