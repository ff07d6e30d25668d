"""What pickled weights may consist of: containers and arrays; `pickled_torch.py` adds tensors of PyTorch.

The tables in both name everything that :mod:`ppfleetx.checkpoint.foreign.unpickle` understands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from ppfleetx.checkpoint.foreign.lazy import LazyTensor
from ppfleetx.checkpoint.foreign.pickle_input import RawBytes
from ppfleetx.checkpoint.foreign.stand_ins import (
    Name,
    Record,
    RefusedPickleError,
    UnsoundPickleError,
    checked_key,
)
from ppfleetx.checkpoint.slices import DTYPE_OF_NUMPY, Index
from ppfleetx.config.errors import CheckpointError, shown

_PLAIN_DTYPE = re.compile(r"[<>=|]?([?bBhHiIlLqQefd]|[biuf][1248])")
_LATIN = ("latin1", "latin-1")
_MAX_DIMS = 32  # NumPy's
_MAX_NESTING, _MAX_ENTRIES, _MAX_NAME = 16, 500_000, 1024
_MOST_REUSE = 4


class PickledDtype:
    """A NumPy element type, numbers only."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _PLAIN_DTYPE.fullmatch(code):
            raise RefusedPickleError(f"an array of the element type {shown(code)}")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        """NumPy's (version, byte order, sub-array, names, fields, ...).

        Raises:
            RefusedPickleError: an element type made of several.
            UnsoundPickleError: a byte order that NumPy does not have.
        """
        if any(part is not None for part in state[2:5]):
            raise RefusedPickleError("an array of a compound element type")
        if state[1] not in ("<", ">", "=", "|"):
            raise UnsoundPickleError("unknown byte order")
        if state[1] in "<>":
            self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """A NumPy array, its elements possibly still in the file."""

    def __init__(self) -> None:
        self.shape: Index = ()
        self._dtype, self._raw, self._fortran = np.dtype("u1"), b"", False

    def fill(self, shape: Any, dtype: Any, raw: Any, *, fortran: bool) -> PickledArray:
        """Take over the parts; raises UnsoundPickleError when they do not fit each other."""
        shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if not isinstance(dtype, PickledDtype) or not are_sizes(shape):
            raise UnsoundPickleError("an array without shape and type")
        if isinstance(raw, str):  # Python 2 wrote bytes as text
            raw = raw.encode("latin-1")
        count = prod(shape) * dtype.dtype.itemsize
        if not (
            raw.may_hold(count) if isinstance(raw, RawBytes) else isinstance(raw, bytes) and len(raw) == count
        ):
            raise UnsoundPickleError("an array whose bytes are not as many as its shape needs")
        self.shape, self._dtype, self._raw, self._fortran = shape, dtype.dtype, raw, bool(fortran)
        return self

    def set_state(self, state: Any) -> None:
        """NumPy's (version, shape, type, whether Fortran order, bytes)."""
        shape, dtype, fortran, raw = state[-4:]
        self.fill(shape, dtype, raw, fortran=fortran)

    def numpy(self) -> np.ndarray:
        """The array, in this machine's byte order.

        Raises:
            CheckpointError: the bytes are more or fewer than the shape needs.
        """
        raw = self._raw.tobytes() if isinstance(self._raw, RawBytes) else self._raw
        if len(raw) != prod(self.shape) * self._dtype.itemsize:
            raise CheckpointError(f"an array of shape {list(self.shape)} has {len(raw)} bytes: it is damaged")
        values = np.frombuffer(raw, self._dtype).reshape(self.shape, order="F" if self._fortran else "C")
        return values.astype(self._dtype.newbyteorder("="), copy=False)

    def lazy(self, *, bfloat16_as_uint16: bool = False) -> LazyTensor:
        """As a tensor to be read later. Raises RefusedPickleError for types that checkpoints do not have."""
        held = self._dtype.newbyteorder("<")
        if bfloat16_as_uint16 and held == np.dtype("<u2"):
            return LazyTensor("BF16", self.shape, self.numpy)
        if held not in DTYPE_OF_NUMPY:
            raise RefusedPickleError(f"an array of the element type {held}")
        return LazyTensor(DTYPE_OF_NUMPY[held], self.shape, self.numpy)


def _reconstruct(kind: Any, *_: Any) -> PickledArray:
    if not isinstance(kind, Name) or kind.text != "numpy.ndarray":
        raise RefusedPickleError("an array of another class than numpy.ndarray")
    return PickledArray()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any = "C") -> PickledArray:
    raw = bytes(raw) if isinstance(raw, bytearray) else raw
    return PickledArray().fill(shape, dtype, raw, fortran=order == "F")


def _scalar(dtype: Any, raw: Any) -> Any:
    return PickledArray().fill((), dtype, raw, fortran=False).numpy()[()]


def _encode(text: Any, encoding: Any = None) -> bytes | RawBytes:
    is_text = isinstance(text, str) or (isinstance(text, RawBytes) and text.is_text)
    if not is_text or not isinstance(encoding, str) or encoding not in _LATIN:
        raise RefusedPickleError(f"_codecs.encode with {shown(encoding)}")
    return text.encode("latin-1") if isinstance(text, str) else text


def _byte_array(content: Any = b"", encoding: Any = None) -> Any:
    if isinstance(content, str):
        return _encode(content, encoding)
    if not isinstance(content, bytes | RawBytes):
        raise RefusedPickleError("builtins.bytearray of something else than bytes")
    return content


def _no_bytes(*arguments: Any) -> bytes:
    """Old protocols write an empty byte string as ``bytes()``."""
    if arguments:
        raise RefusedPickleError("builtins.bytes with contents")
    return b""


def _paddle_tensor(*arguments: Any) -> Any:
    """Paddle writes a DenseTensor as ``eval('data', {'data': array})``; that one form is known here."""
    if len(arguments) == 2 and arguments[0] == "data" and isinstance(arguments[1], dict):
        scope = arguments[1]
        if list(scope) == ["data"] and isinstance(scope["data"], PickledArray):
            return scope["data"]
    raise RefusedPickleError("builtins.eval")


def _container(kind: type) -> Callable[..., Any]:
    """Makes `kind` out of nothing or of a built-in container."""

    def build(*arguments: Any) -> Any:
        if len(arguments) > 1 or not all(isinstance(a, list | tuple | dict | set) for a in arguments):
            raise RefusedPickleError(f"builtins.{kind.__name__} of something else than a container")
        if kind is dict and arguments and not isinstance(arguments[0], dict):
            return dict(_pair(item) for item in arguments[0])
        if kind in (set, frozenset):
            return kind(checked_key(key) for argument in arguments for key in argument)
        return kind(*arguments)

    return build


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise UnsoundPickleError("a dictionary made of something else than pairs")
    return checked_key(item[0]), item[1]


def _default_dict(*arguments: Any) -> dict[Any, Any]:
    if len(arguments) > 1:
        raise RefusedPickleError("collections.defaultdict with contents")
    return {}


def _old_style_object(kind: Any, *_: Any) -> Record:
    """What Python 2 and protocol 0 call to make an object of a class: of an absent one only."""
    if not isinstance(kind, Name) or not kind.is_record:
        raise RefusedPickleError(
            f"an object of {kind.text if isinstance(kind, Name) else type(kind).__name__}"
        )
    return kind.build()


def only_named(text: str) -> Callable[..., Any]:
    def build(*_: Any) -> Any:
        raise RefusedPickleError(f"a call of {text}")

    return build


def both(*names: str) -> list[str]:
    """Names in Python 3 and Python 2."""
    return [f"{module}.{name}" for module in ("builtins", "__builtin__") for name in names]


PLAIN_NAMES: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _container(dict),
    "collections.defaultdict": _default_dict,
    "_codecs.encode": _encode,
    "numpy.ndarray": only_named("numpy.ndarray"),
    "numpy.dtype": PickledDtype,
    **{
        f"numpy.{core}.{name}": build
        for core in ("core", "_core")
        for name, build in {
            "multiarray._reconstruct": _reconstruct,
            "multiarray.scalar": _scalar,
            "numeric._frombuffer": _from_buffer,
        }.items()
    },
    **{
        name: _container(kind) for kind in (tuple, list, dict, set, frozenset) for name in both(kind.__name__)
    },
    **dict.fromkeys(both("bytearray"), _byte_array),
    **dict.fromkeys(both("bytes"), _no_bytes),
    **{name: only_named(name) for name in both("object")},
    "copyreg._reconstructor": _old_style_object,
    "copy_reg._reconstructor": _old_style_object,
}

PADDLE_NAMES = PLAIN_NAMES | dict.fromkeys(both("eval"), _paddle_tensor)


def are_sizes(numbers: Any) -> bool:
    """Whether these can be the lengths of a tensor's dimensions, or the steps between its elements."""
    return (
        isinstance(numbers, tuple | list)
        and len(numbers) <= _MAX_DIMS
        and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    )


def flatten(tree: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    """Tensors in nested dictionaries by their keys joined with dots. Everything else is passed over.

    Raises:
        CheckpointError: the nesting has no end, or two tensors have the same name.
    """
    named: dict[str, LazyTensor] = {}
    entries = 0
    waiting = [("", 0, tree)]
    while waiting:
        prefix, depth, node = waiting.pop()
        if not isinstance(node, Mapping):
            tensor = node.lazy() if isinstance(node, PickledArray) else node
            if isinstance(tensor, LazyTensor):
                if prefix in named:
                    raise CheckpointError(f"two tensors in it have the name {shown(prefix)}")
                named[prefix] = tensor
            continue
        entries += len(node)
        if depth > _MAX_NESTING or entries > _MAX_ENTRIES:
            raise CheckpointError(
                f"its dictionaries are nested more than {_MAX_NESTING} levels deep, or have more than "
                f"{_MAX_ENTRIES} entries"
            )
        for key, child in reversed(node.items()):
            name = f"{prefix}.{key}" if depth else f"{key}"
            if len(name) > _MAX_NAME:
                raise CheckpointError(f"a name in it is too long: {shown(name)}")
            waiting.append((name, depth + 1, child))
    return named


def check_claims(tensors: Iterable[LazyTensor], file_bytes: int) -> None:
    """Tensors may share what the file holds (a tied head does), and archives may be compressed, but not much.

    Raises:
        CheckpointError: the tensors have several times the bytes of their file.
    """
    claimed = sum(tensor.num_bytes for tensor in tensors)
    if claimed > _MOST_REUSE * file_bytes + (1 << 20):
        raise CheckpointError(
            f"its tensors would have {claimed} bytes, more than {_MOST_REUSE} times those of the file"
        )
