"""Reading pickles without running them.

A pickle is a program for a small stack machine. This is such a machine that has no way to import, call
or look up anything: a name in a pickle (``posix.system``) is a text, and only texts of a fixed table
stand for something, namely for functions of ours that put arrays and containers together. Any other
name ends the reading with :class:`RefusedPickleError`, which says the name. Long byte strings (weights) are
not read but noted down with their place in the file.

`pickle.Unpickler` does not do here, though its `find_class` and `persistent_load` can be replaced.
It reads every byte string into memory, and weights are byte strings: a file of 10 GB would take 10 GB before
one tensor is asked for. It counts nothing, so that a pickle of a few hundred bytes makes it work and allocate
for ever, and it takes any key into a dictionary. And what a file puts on its stack it calls and changes
(`REDUCE`, `BUILD`) with whatever arguments the file says. Each of these is decided in the instruction itself,
which the C code does not let anybody replace.

A pickle can also be small and mean something huge: a list that holds itself, a tuple of two of the tuple
before, a copy of a copy. So instructions and copies are counted, and keys are plain values, whose hash is
quickly computed and differs. What comes out may still be a structure without an end: never walk it whole, and
never print it (`ppfleetx.config.errors.shown` is safe).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ppfleetx.checkpoint.foreign.pickle_input import PickleInput, RawBytes
from ppfleetx.checkpoint.foreign.stand_ins import (
    Name,
    Record,
    RefusedPickleError,
    UnsoundPickleError,
    checked_key,
)
from ppfleetx.config.errors import CheckpointError

MAX_STEPS = 1_000_000  # a tensor takes 20 to 30
_MAX_INT_BITS = 2048
_MAX_INDEX = 1 << 32
_LAZY_FROM = 4096
# Instructions that a long string follows, by the size of its length.
_LENGTH_BYTES = {"BINBYTES": 4, "BINBYTES8": 8, "BYTEARRAY8": 8, "BINSTRING": 4}
_TEXT_LENGTH_BYTES = {"BINUNICODE": 4, "BINUNICODE8": 8}
# They push what follows them; the others that have an argument fetch or make an object.
_LITERALS = frozenset(
    instruction.name
    for instruction in pickletools.opcodes
    if instruction.arg is not None
    and not instruction.stack_before
    and instruction.stack_after not in ([], [pickletools.anyobject])
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
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


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
        self._input = PickleInput(file)
        self._names, self._record_prefixes = names, tuple(record_prefixes)
        self._persistent, self._path = persistent, path
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stack below each mark
        self._memo: dict[int, Any] = {}
        self._steps_left = MAX_STEPS

    def load(self) -> Any:
        """The next pickle of the stream.

        Raises:
            CheckpointError: the pickle is damaged, too large, or asks for something that is not allowed.
        """
        self._stack, self._below, self._memo = [], [], {}
        place, name = 0, None
        try:
            while True:
                place, name = self._input.tell(), None
                name, argument = self._next()
                if name == "STOP":
                    return self._pop()
                self._step(name, argument)
        except CheckpointError:
            raise
        except _DAMAGE as error:
            # Python's own message would not help the owner of the file, so it is left out.
            reason = f" ({error})" if isinstance(error, UnsoundPickleError) else ""
            what = "is no sound instruction" if name is None else f"{name} cannot be carried out"
            raise CheckpointError(f"not a sound pickle: at byte {place}, {what}{reason}") from error

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise CheckpointError(
                f"its pickle has more than {MAX_STEPS} instructions, or is made of copies of copies; a "
                "description of tensors needs far fewer"
            )

    def _next(self) -> tuple[str, Any]:
        code = self._input.read(1).decode("latin-1")
        if code not in pickletools.code2op:
            raise CheckpointError("not a pickle: it holds an instruction that does not exist")
        instruction = pickletools.code2op[code]
        if instruction.name in _LENGTH_BYTES:
            return instruction.name, self._long_bytes(instruction.name)
        if instruction.name in _TEXT_LENGTH_BYTES:
            return instruction.name, self._long_text(_TEXT_LENGTH_BYTES[instruction.name])
        if instruction.arg is None:
            return instruction.name, None
        argument = instruction.arg.reader(self._input)
        if isinstance(argument, int) and argument.bit_length() > _MAX_INT_BITS:
            raise UnsoundPickleError("a number without sense")
        return instruction.name, argument

    def _long_bytes(self, name: str) -> bytes | str | RawBytes:
        length = int.from_bytes(self._input.read(_LENGTH_BYTES[name]), "little")
        if self._path is None or length < _LAZY_FROM:
            content = self._input.read(length)
            return content.decode("latin-1") if name == "BINSTRING" else content
        return RawBytes(self._path, self._input.skip(length), length)

    def _long_text(self, length_bytes: int) -> str | RawBytes:
        length = int.from_bytes(self._input.read(length_bytes), "little")
        if self._path is None or length < _LAZY_FROM:
            return self._input.read(length).decode("utf-8", "surrogatepass")
        return RawBytes(self._path, self._input.skip(length), length, is_text=True)

    def _step(self, name: str, argument: Any) -> None:
        self._spend(1)
        if name in _LITERALS:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _EMPTY:
            self._push(_EMPTY[name]())
        elif name in _SHORT_TUPLES:
            values = [self._pop() for _ in range(_SHORT_TUPLES[name])]
            self._push(tuple(reversed(values)))
        elif name not in ("PROTO", "FRAME"):
            handler = getattr(self, f"_do_{name.lower()}", None)
            if handler is None:
                raise RefusedPickleError(f"the pickle instruction {name}")
            handler(argument)

    # ---- stack and memo

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        return self._stack.pop()

    def _top(self) -> Any:
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        values = self._stack
        self._stack = self._below.pop()
        return values

    def _do_mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _do_pop(self, _: None) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_to_mark()

    def _do_pop_mark(self, _: None) -> None:
        self._pop_to_mark()

    def _do_dup(self, _: None) -> None:
        self._push(self._top())

    def _do_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._top()

    def _put(self, index: int) -> None:
        if not 0 <= index < _MAX_INDEX:
            raise UnsoundPickleError("an index without sense")
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        self._push(self._memo[index])

    _do_put = _do_binput = _do_long_binput = _put
    _do_get = _do_binget = _do_long_binget = _get

    # ---- containers

    def _do_tuple(self, _: None) -> None:
        self._push(tuple(self._pop_to_mark()))

    def _do_list(self, _: None) -> None:
        self._push(self._pop_to_mark())

    def _do_dict(self, _: None) -> None:
        self._push(dict(_pairs(self._pop_to_mark())))

    def _do_frozenset(self, _: None) -> None:
        self._push(frozenset(map(checked_key, self._pop_to_mark())))

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
        self._top().update(map(checked_key, values))

    # ---- names and what stands for calls

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push(self._named(f"{module}.{name}"))

    def _do_stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise UnsoundPickleError("a name that is not text")
        self._push(self._named(f"{module}.{name}"))

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
            raise UnsoundPickleError("arguments that are not a tuple")
        self._spend(_copied(arguments))
        self._push(called.build(*arguments))

    def _do_build(self, _: None) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Name):
            raise RefusedPickleError(f"to change {target.text}")
        # Attributes of a plain container (PyTorch's `_metadata`) are nothing we need.
        if not isinstance(target, dict | list | set):
            self._spend(_copied(state) if isinstance(state, tuple) else 0)
            target.set_state(state)

    def _do_persid(self, argument: str) -> None:
        self._load_persistent(argument)

    def _do_binpersid(self, _: None) -> None:
        self._load_persistent(self._pop())

    def _load_persistent(self, identity: Any) -> None:
        if self._persistent is None:
            raise RefusedPickleError("an object kept outside of the pickle")
        self._push(self._persistent(identity))


def _pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(values) % 2:
        raise UnsoundPickleError("a key without a value")
    return zip(map(checked_key, values[::2]), values[1::2], strict=True)


def _copied(values: tuple[Any, ...]) -> int:
    """What a call that copies its arguments may cost, in steps: one for an item or for 64 bytes of a text."""
    steps = len(values)
    for value in values:
        if isinstance(value, str | bytes | bytearray):
            steps += len(value) // 64
        elif isinstance(value, tuple | list | dict | set | frozenset):
            steps += len(value)
    return steps


def _only(target: Any, *kinds: type) -> None:
    if not isinstance(target, kinds):
        raise UnsoundPickleError(f"something is put into {_name_of(target)}")


def _name_of(value: Any) -> str:
    if isinstance(value, Name):
        return value.text
    return value.class_name if isinstance(value, Record) else f"a {type(value).__name__}"
