"""Reading pickles without running them.

A pickle is a program for a small stack machine. This is such a machine that has no way to import, call
or look up anything: a name in a pickle (``posix.system``) is a text, and only texts of a fixed table
stand for something, namely for functions of ours that put arrays and containers together. Any other
name ends the reading with :class:`RefusedPickleError`, which says the name. Long byte strings (weights) are
not read but noted down with their place in the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ppfleetx.checkpoint.lazy import read_bytes
from ppfleetx.config.errors import CheckpointError

_LAZY_FROM = 4096
_LENGTH_BYTES = {"BINBYTES": 4, "BINBYTES8": 8, "BYTEARRAY8": 8}
_LITERALS = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# What a damaged or senseless pickle makes our own code raise.
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, MemoryError)
_MARK = object()


class RefusedPickleError(CheckpointError):
    """A pickle asks for more than arrays and containers. `wanted` is what it names."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        super().__init__(wanted)


@dataclass(frozen=True)
class RawBytes:
    """A long byte string of a pickle, still in its file."""

    path: Path
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def tobytes(self) -> bytes:
        return read_bytes(self.path, self.start, self.length).tobytes()


@dataclass(frozen=True, eq=False)
class Name:
    """A global name in a pickle. `build` is ours: it makes what a call of the name would make."""

    text: str
    build: Callable[..., Any]
    is_record: bool = False


@dataclass(eq=False)
class Record:
    """Stands for an object of a class that is not there: its arguments and its state, and no behaviour."""

    class_name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def set_state(self, state: Any) -> None:
        self.state = state

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute out of the state; that of ``argparse.Namespace`` and most classes is a dictionary."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


class Unpickler:
    """Reads pickles from one stream.

    Args:
        file: where to read; seekable.
        names: what each known global name stands for.
        record_prefixes: names beginning with one of these stand for a :class:`Record`.
        persistent: makes an object of a persistent id (PyTorch's storages); None: they are refused.
        path: the file behind `file`, so that long byte strings can be left in it; None: they are read.

    :meth:`load` raises RefusedPickleError naming what is asked for and not in the table, and CheckpointError
    for anything that is not a pickle.
    """

    def __init__(
        self,
        file: BinaryIO,
        names: Mapping[str, Callable[..., Any]],
        *,
        record_prefixes: Iterable[str] = (),
        persistent: Callable[[Any], Any] | None = None,
        path: Path | None = None,
    ) -> None:
        self._input = _Bounded(file)
        self._names, self._record_prefixes = names, tuple(record_prefixes)
        self._persistent, self._path = persistent, path
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The next pickle of the stream."""
        self._stack, self._memo = [], {}
        try:
            while True:
                name, argument = self._next()
                if name == "STOP":
                    return self._pop()
                self._step(name, argument)
        except CheckpointError:
            raise
        except _DAMAGE as error:
            raise CheckpointError(f"not a sound pickle: {type(error).__name__} {error}") from error

    def _next(self) -> tuple[str, Any]:
        code = self._input.read(1).decode("latin-1")
        if code not in pickletools.code2op:
            raise CheckpointError("not a pickle: it holds an instruction that does not exist")
        instruction = pickletools.code2op[code]
        if instruction.name in _LENGTH_BYTES:
            return instruction.name, self._long_bytes(_LENGTH_BYTES[instruction.name])
        if instruction.arg is None:
            return instruction.name, None
        return instruction.name, instruction.arg.reader(self._input)

    def _long_bytes(self, length_bytes: int) -> bytes | RawBytes:
        length = int.from_bytes(self._input.read(length_bytes), "little")
        if self._path is None or length < _LAZY_FROM:
            return self._input.read(length)
        return RawBytes(self._path, self._input.skip(length), length)

    def _step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _SHORT_TUPLES:
            values = [self._pop() for _ in range(_SHORT_TUPLES[name])]
            self._stack.append(tuple(reversed(values)))
        elif name not in ("PROTO", "FRAME"):
            handler = getattr(self, f"_do_{name.lower()}", None)
            if handler is None:
                raise RefusedPickleError(f"the pickle instruction {name}")
            handler(argument)

    # ---- stack and memo

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("the stack is out of order")
        return value

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("the stack is out of order")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _do_mark(self, _: None) -> None:
        self._stack.append(_MARK)

    def _do_pop(self, _: None) -> None:
        self._stack.pop()

    def _do_pop_mark(self, _: None) -> None:
        self._pop_to_mark()

    def _do_dup(self, _: None) -> None:
        self._stack.append(self._top())

    def _do_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._top()

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _do_put = _do_binput = _do_long_binput = _put
    _do_get = _do_binget = _do_long_binget = _get

    # ---- containers

    def _do_tuple(self, _: None) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _do_list(self, _: None) -> None:
        self._stack.append(self._pop_to_mark())

    def _do_dict(self, _: None) -> None:
        self._stack.append(dict(_pairs(self._pop_to_mark())))

    def _do_frozenset(self, _: None) -> None:
        self._stack.append(frozenset(self._pop_to_mark()))

    def _do_append(self, _: None) -> None:
        self._extend([self._pop()])

    def _do_appends(self, _: None) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        _only(target, list, Record)
        (target.items if isinstance(target, Record) else target).extend(values)

    def _do_setitem(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def _do_setitems(self, _: None) -> None:
        self._update(self._pop_to_mark())

    def _update(self, values: list[Any]) -> None:
        target = self._top()
        _only(target, dict, Record)
        if isinstance(target, Record):
            target.items.extend(_pairs(values))
        else:
            target.update(_pairs(values))

    def _do_additems(self, _: None) -> None:
        values = self._pop_to_mark()
        _only(self._top(), set)
        self._top().update(values)

    # ---- names and what stands for calls

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._named(f"{module}.{name}"))

    def _do_stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("a name that is not text")
        self._stack.append(self._named(f"{module}.{name}"))

    def _named(self, text: str) -> Name:
        if text in self._names:
            return Name(text, self._names[text])
        if text.startswith(self._record_prefixes):
            return Name(text, lambda *args: Record(text, args), is_record=True)
        raise RefusedPickleError(text)

    def _do_reduce(self, _: None) -> None:
        arguments, called = self._pop(), self._pop()
        self._call(called, arguments)

    _do_newobj = _do_reduce

    def _do_newobj_ex(self, _: None) -> None:
        keywords, arguments, called = self._pop(), self._pop(), self._pop()
        if keywords:
            raise RefusedPickleError(f"{_name_of(called)} with keyword arguments")
        self._call(called, arguments)

    def _do_inst(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._call(self._named(f"{module}.{name}"), tuple(self._pop_to_mark()))

    def _do_obj(self, _: None) -> None:
        called, *arguments = self._pop_to_mark()
        self._call(called, tuple(arguments))

    def _call(self, called: Any, arguments: Any) -> None:
        if not isinstance(called, Name):
            raise RefusedPickleError(f"a call of {_name_of(called)}")
        if not isinstance(arguments, tuple):
            raise ValueError("arguments that are not a tuple")
        self._stack.append(called.build(*arguments))

    def _do_build(self, _: None) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Name):
            raise RefusedPickleError(f"to change {target.text}")
        # Attributes of a plain container (PyTorch's `_metadata`) are nothing we need.
        if not isinstance(target, dict | list | set):
            target.set_state(state)

    def _do_persid(self, argument: str) -> None:
        self._load_persistent(argument)

    def _do_binpersid(self, _: None) -> None:
        self._load_persistent(self._pop())

    def _load_persistent(self, identity: Any) -> None:
        if self._persistent is None:
            raise RefusedPickleError("an object kept outside of the pickle")
        self._stack.append(self._persistent(identity))


class _Bounded:
    """A stream that never allocates for more bytes than it has left."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        here = file.tell()
        self._end = file.seek(0, 2)
        file.seek(here)

    def read(self, count: int) -> bytes:
        if count < 0 or count > self._end - self._file.tell():
            raise CheckpointError("not a sound pickle: it ends too early")
        return self._file.read(count)

    def readline(self) -> bytes:
        return self._file.readline()

    def skip(self, count: int) -> int:
        """Pass over some bytes; returns where they begin."""
        start = self._file.tell()
        if count > self._end - start:
            raise CheckpointError("not a sound pickle: it ends too early")
        self._file.seek(start + count)
        return start


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def _only(target: Any, *kinds: type) -> None:
    if not isinstance(target, kinds):
        raise ValueError(f"something is put into {_name_of(target)}")


def _name_of(value: Any) -> str:
    if isinstance(value, Name):
        return value.text
    return value.class_name if isinstance(value, Record) else f"a {type(value).__name__}"
