"""Unpickle weights without running code from the file. A pickle names the classes and functions that it
needs. Only those that build arrays and containers are allowed. Objects of some further classes are read as
plain data (:class:`Record`)."""

from __future__ import annotations

import collections
import copyreg
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.checkpoint.slices import DTYPE_OF_NUMPY
from ppfleetx.config.errors import CheckpointError, shown


class RefusedPickleError(CheckpointError):
    """A pickle was refused because it contains something that is not allowed."""


class Record:
    """Stands in for a pickled object whose class is not imported. ``state`` is the data of the object."""

    class_name = ""
    state: Any = None

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:
        return f"<{self.class_name}>"

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StandIn:
    """Base class of stand-ins for classes of other libraries, such as PyTorch. A pickle cannot set attributes
    of a stand-in."""

    def __setstate__(self, state: Any) -> None:  # prevents pickles from setting attributes
        raise RefusedPickleError(f"a state of {type(self).__name__}")


class WeightsUnpickler(pickle.Unpickler):
    """An unpickler that refuses all classes and functions except allowed ones.

    Args:
        file: the pickle.
        names: full name of an allowed class or function, such as ``numpy.ndarray`` -> what to use for it.
        record_prefixes: prefixes of the full names of classes whose objects are read as :class:`Record`.
        persistent: a function that returns the object for a persistent id, such as a PyTorch storage. If
            None, persistent ids are refused.
    """

    def __init__(
        self,
        file: BinaryIO,
        names: Mapping[str, Any],
        *,
        record_prefixes: Iterable[str] = (),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="latin1")  # reads byte strings of Python 2
        self._names, self._prefixes, self._persistent = names, tuple(record_prefixes), persistent

    def find_class(self, module: str, name: str) -> Any:
        text = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if text in self._names:
            found = self._names[text]
            # A pickle could set attributes of the function, so give it a new one.
            return found if isinstance(found, type) else lambda *args: found(*args)
        if text.startswith(self._prefixes):
            return type("Record", (Record,), {"class_name": text})
        raise RefusedPickleError(text)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedPickleError("an object kept outside of the pickle")
        return self._persistent(pid)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager for reading a pickle. Errors in it are raised again with ``path``, the path of the
    pickle, in their message.

    Raises RefusedPickleError if the pickle needs a class or function that is not allowed; CheckpointError if
    the pickle is damaged.
    """
    try:
        yield
    except RefusedPickleError as error:
        raise RefusedPickleError(
            f"{path} is refused: it asks for {shown(str(error))}. Weights are read from such files, arrays "
            "and containers, and nothing else; nothing of it has been run"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError:  # not an error of the file's contents
        raise
    except Exception as error:  # damaged pickles can raise almost anything
        raise CheckpointError(f"{path} is damaged, or not a file of weights") from error


class PickledType:
    """Stands in for ``numpy.dtype`` in a pickle. Only types of plain numbers are allowed."""

    def __init__(self, code: str, *_: Any) -> None:
        self.dtype = np.dtype(code)
        if self.dtype.hasobject or self.dtype.names is not None:
            raise RefusedPickleError(f"an array of the element type {shown(code)}")

    def __setstate__(self, state: Any) -> None:
        """Set the byte order from the state that NumPy pickles: (version, byte order, ...)."""
        self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """Stands in for ``numpy.ndarray`` in a pickle."""

    array = np.empty(0, np.uint8)

    # NumPy's own __setstate__ trusts the pickle's data.
    def __setstate__(self, state: Any) -> None:
        """Make the array from NumPy's pickled state: (version, shape, type, is Fortran order, bytes)."""
        shape, kind, is_fortran, raw = state[-4:]
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        self.array = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if is_fortran else "C")


def tensor_of(array: np.ndarray, *, bfloat16_as_uint16: bool = False) -> LazyTensor:
    """Make a lazy tensor from a NumPy array. If ``bfloat16_as_uint16``, a uint16 array is read as the bits
    of bfloat16 numbers. Raises RefusedPickleError if the element type is not supported."""
    held = array.dtype.newbyteorder("<")
    if bfloat16_as_uint16 and held == np.dtype("<u2"):
        return LazyTensor("BF16", array.shape, lambda: array)
    if held not in DTYPE_OF_NUMPY:
        raise RefusedPickleError(f"an array of the element type {held}")
    native = array.dtype.newbyteorder("=")
    return LazyTensor(DTYPE_OF_NUMPY[held], array.shape, lambda: array.astype(native, copy=False))


def flatten(tree: Mapping[Any, Any]) -> dict[str, LazyTensor]:
    """Collect the tensors in nested dictionaries, by name. The name of a tensor is its keys joined with
    dots. Other objects are ignored."""
    named: dict[str, LazyTensor] = {}

    def collect(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            for key, child in node.items():
                collect(child, (*path, str(key)))
        elif isinstance(node, PickledArray | LazyTensor):
            name = ".".join(path)
            named[name] = node if isinstance(node, LazyTensor) else tensor_of(node.array)

    collect(tree, ())
    return named


def _array(raw: Any, kind: PickledType, shape: Any, order: str = "C") -> PickledArray:
    made = PickledArray()
    made.__setstate__((shape, kind, order == "F", raw))
    return made


def _paddle_tensor(*arguments: Any) -> PickledArray:
    """Stand in for ``eval`` in a pickle. Paddle pickles a DenseTensor as ``eval('data', {'data': array})``;
    for this call, return the array. Raises RefusedPickleError for any other call."""
    if len(arguments) == 2 and arguments[0] == "data" and isinstance(arguments[1], dict):
        scope = arguments[1]
        if list(scope) == ["data"] and isinstance(scope["data"], PickledArray):
            return scope["data"]
    raise RefusedPickleError("builtins.eval")


ARRAY_NAMES: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": lambda text, *_: text.encode("latin-1"),  # bytes, in protocols 0 to 2
    "numpy.ndarray": StandIn,
    "numpy.dtype": PickledType,
    **{
        f"numpy.{core}.{name}": build
        for core in ("core", "_core")
        for name, build in {
            "multiarray._reconstruct": lambda *_: PickledArray(),
            "multiarray.scalar": lambda kind, raw: _array(raw, kind, ()).array[()],
            "numeric._frombuffer": _array,
        }.items()
    },
    **{
        f"builtins.{kind.__name__}": kind
        for kind in (tuple, list, dict, set, frozenset, bytearray, bytes, object)
    },
    "copyreg._reconstructor": copyreg._reconstructor,
    "copy_reg._reconstructor": copyreg._reconstructor,
}
"""Allowed names in pickles of arrays. The names for PyTorch tensors are in ``torch_file.py``."""

PADDLE_NAMES = ARRAY_NAMES | {"builtins.eval": _paddle_tensor}
