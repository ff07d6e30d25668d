"""Convert parameters and optimizer state between Paddle tensors and the slices in a checkpoint. The attribute
`info` of a parameter (see nn/stage.py) says which part of the whole tensor this rank has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import cast
from ppfleetx.checkpoint.manifest import TensorEntry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import DTYPE_OF_NAME, MODEL, OPTIMIZER, SIXTEEN_BIT, Index, TensorSlice
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.message_text import counted
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from paddle import Tensor

NamedTensors = Iterable[tuple[str, "Tensor"]]
StateKey = tuple[str, str]
MASTER_WEIGHT = "master_weight"
_INTEGERS = ("I8", "U8")


def model_slices(named_params: NamedTensors) -> Iterator[TensorSlice]:
    """Yield this rank's slice of each parameter. The data of a slice is read only when the slice is
    written."""
    for name, param in named_params:
        yield _slice(name, MODEL, "", param, param.info)


def optimizer_slices(state: Mapping[StateKey, Tensor], named_params: NamedTensors) -> Iterator[TensorSlice]:
    """Yield the slices of optimizer state that this rank saves."""
    params = dict(named_params)
    for (name, state_name), tensor in state.items():
        info = params[name].info
        # A state that does not have its parameter's shape, such as a beta power, is the same on all ranks, so
        # one rank saves it.
        if tuple(tensor.shape) != tuple(info.local_shape) and any(info.offset):
            continue
        yield _slice(name, OPTIMIZER, state_name, tensor, info)


def load_model(
    named_params: NamedTensors,
    checkpoint: Checkpoint,
    *,
    vocab_size: int | None = None,
    new: Collection[str] = (),
    allow_missing: bool = False,
    allow_extra: bool | Collection[str] = False,
    allow_other_shapes: bool = False,
    model_names: Collection[str] = (),
) -> list[str]:
    """Load weights from a checkpoint into the parameters of this rank. Returns the names of the loaded
    parameters.

    Weights are converted to the element types of the parameters. If a weight would be converted from 16 bits
    and the checkpoint has its float32 master weight, the master weight is loaded instead. If only the size of
    the vocabulary padding differs, the padding of the parameters keeps its values.

    Args:
        named_params: (name in the whole model, parameter) of this rank.
        vocab_size: the model's vocabulary size without padding.
        new: names of parameters that keep their values if the checkpoint lacks them, such as adapters of a
            run that begins.
        allow_missing: if True, any parameter that the checkpoint lacks keeps its values, with a warning.
        allow_extra: names of checkpoint tensors to ignore if the model does not have them. True: all.
        allow_other_shapes: if True, parameters that have another shape or vocabulary in the checkpoint keep
            their values; if False, such parameters are an error.
        model_names: all names of the whole model, if ``named_params`` are only a part of it.

    Raises CheckpointError if the checkpoint is damaged or does not fit the model. If it does not fit, no
    parameter is changed.
    """
    params = list(named_params)
    _check_quantized(checkpoint, params)
    stored_size = checkpoint.manifest.vocab_size
    others = vocab_size is not None and stored_size is not None and stored_size != vocab_size
    if others and not allow_other_shapes:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has a vocabulary of {stored_size}, the model "
            f"(Model.vocab_size) of {vocab_size}: they belong to different tokenizers; with "
            "Engine.save_load.allow_other_shapes=True the embedding starts afresh"
        )
    names = [name for name, _ in params]
    _check_names(checkpoint, list(dict.fromkeys([*names, *model_names])), new, allow_missing, allow_extra)
    stored = set(checkpoint.names())
    present = [(name, param) for name, param in params if name in stored]
    if allow_other_shapes:
        present = _of_same_shape(checkpoint, present, others)
    for name, param in present:
        _check_shape(checkpoint, checkpoint.entry(name), param.info)
    for name, param in present:
        kind, state = MODEL, ""
        has_master = (OPTIMIZER, name, MASTER_WEIGHT) in checkpoint.manifest.tensors
        stored_as = checkpoint.entry(name).dtype
        # Parameters of another type than the 16-bit weights in the checkpoint get the float32 masters.
        if has_master and stored_as in SIXTEEN_BIT and dtype_of(param) != stored_as:
            kind, state = OPTIMIZER, MASTER_WEIGHT
        _fill(checkpoint, checkpoint.entry(name, kind, state), param, param.info)
    return [name for name, _ in present]


def load_optimizer(
    state: Mapping[StateKey, Tensor],
    named_params: NamedTensors,
    checkpoint: Checkpoint,
    *,
    model_names: Collection[str] = (),
) -> None:
    """Load optimizer state from a checkpoint into the tensors of ``state`` (`Optimizer.state()`). Where the
    checkpoint lacks a master weight, its model weight is loaded instead. Master weights that ``state`` does
    not have are ignored.

    Args:
        state: this rank's state, by (parameter name, state name).
        named_params: (name in the whole model, parameter) of this rank.
        model_names: all names of the whole model, if ``state`` is only a part of it.

    Raises CheckpointError if the checkpoint is damaged or does not fit the optimizer and the model. If it
    does not fit, nothing is changed.
    """
    params = dict(named_params)
    stored = set(checkpoint.keys(OPTIMIZER))
    missing = [key for key in state if key not in stored and key[1] != MASTER_WEIGHT]
    elsewhere = set(model_names) - {name for name, _ in state}  # parameters of other ranks, which check them
    unknown = [
        key for key in stored if key not in state and key[1] != MASTER_WEIGHT and key[0] not in elsewhere
    ]
    if missing or unknown:
        raise CheckpointError(
            f"the optimizer state in checkpoint {checkpoint.path} is not that of this optimizer and model"
            f"{_listed('it lacks', ['/'.join(key) for key in missing])}"
            f"{_listed('it has besides', ['/'.join(key) for key in sorted(unknown)])}"
            "; set Engine.save_load.load_optim to False to start with a fresh optimizer"
        )
    plan = []
    for key, tensor in state.items():
        entry = checkpoint.entry(key[0], OPTIMIZER, key[1]) if key in stored else checkpoint.entry(key[0])
        info = _StateInfo(tensor, params[key[0]].info)
        _check_shape(checkpoint, entry, info)
        plan.append((entry, tensor, info))
    for entry, tensor, info in plan:
        _fill(checkpoint, entry, tensor, info)


def load_masters(
    state: Mapping[StateKey, Tensor], named_params: NamedTensors, checkpoint: Checkpoint
) -> None:
    """Load the master weights of the optimizer ``state`` from a checkpoint. Where the checkpoint lacks a
    master weight, its model weight is loaded instead. Call this after :func:`load_model`. Raises
    CheckpointError if data is damaged."""
    # Without this, the master weights keep their old values, and the first update would copy these into the
    # 16-bit parameters.
    params, stored = dict(named_params), set(checkpoint.names())
    for (name, state_name), tensor in state.items():
        if state_name == MASTER_WEIGHT and name in stored:
            has_master = (OPTIMIZER, name, MASTER_WEIGHT) in checkpoint.manifest.tensors
            key = (name, OPTIMIZER, MASTER_WEIGHT) if has_master else (name, MODEL, "")
            _fill(checkpoint, checkpoint.entry(*key), tensor, params[name].info)


class _StateInfo:
    """Says which part of an optimizer state this rank has, with the same attributes as the ``info`` of a
    parameter."""

    def __init__(self, tensor: Tensor, info: Any) -> None:
        shape = tuple(tensor.shape)
        # A state that does not have its parameter's shape, such as a beta power, is whole on every rank.
        follows = shape == tuple(info.local_shape)
        self.name = info.name
        self.global_shape: Index = tuple(info.global_shape) if follows else shape
        self.offset: Index = tuple(info.offset) if follows else (0,) * len(shape)
        self.local_shape: Index = shape
        self.kind = info.kind if follows else ""


def _slice(name: str, kind: str, state: str, tensor: Tensor, info: Any) -> TensorSlice:
    from ppfleetx.distributed.host_device_copy import download

    place = _StateInfo(tensor, info)
    return TensorSlice(
        name=name,
        kind=kind,
        dtype=dtype_of(tensor),
        global_shape=place.global_shape,
        offset=place.offset,
        shape=place.local_shape,
        data=lambda: host_array(tensor),
        state=state,
        vocab_dim=_vocab_dim(place),
        changes_with_update=_is_host(tensor),
        fetch=lambda: download(tensor),
    )


def host_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's elements as a NumPy array, bfloat16 as bits in uint16. The array can share the
    tensor's memory."""
    return np.from_dlpack(tensor.detach()) if _is_host(tensor) else tensor.numpy()


@contextmanager
def changed_on_host(tensor: Tensor) -> Iterator[np.ndarray]:
    """Context manager that yields a tensor's elements as a NumPy array, and writes changes back."""
    if _is_host(tensor):
        yield host_array(tensor)
        return
    values = host_array(tensor).copy()
    yield values
    _set_in_place(tensor, values)


def _is_host(tensor: Tensor) -> bool:
    """Return whether NumPy can use the tensor's memory: on the host, contiguous, and not bfloat16."""
    return tensor.place.is_cpu_place() and dtype_of(tensor) != "BF16" and tensor.is_contiguous()


def dtype_of(tensor: Tensor) -> str:
    return DTYPE_OF_NAME[str(tensor.dtype).removeprefix("paddle.")]


def _vocab_dim(place: Any) -> int | None:
    """Return the vocabulary dimension of a word embedding or an untied head; None for other parameters."""
    if place.kind == "word_embedding":
        return 0
    return len(place.global_shape) - 1 if place.kind == "head" else None


def _fill(checkpoint: Checkpoint, entry: TensorEntry, tensor: Tensor, place: Any) -> None:
    offset, shape = tuple(place.offset), tuple(place.local_shape)
    if tuple(entry.shape) == tuple(place.global_shape):
        if entry.dtype == dtype_of(tensor) and _is_host(tensor):
            checkpoint.read(*_key(entry), offset=offset, shape=shape, out=host_array(tensor))
        else:
            values = checkpoint.read(*_key(entry), offset=offset, shape=shape)
            _set_in_place(tensor, cast(values, entry.dtype, dtype_of(tensor)))
        return
    dim = entry.vocab_dim
    rows = min(checkpoint.manifest.vocab_size - offset[dim], shape[dim])
    current = host_array(tensor).copy()
    if rows > 0:
        part = tuple(rows if axis == dim else size for axis, size in enumerate(shape))
        values = checkpoint.read(*_key(entry), offset=offset, shape=part)
        current[tuple(slice(size) for size in part)] = cast(values, entry.dtype, dtype_of(tensor))
    _set_in_place(tensor, current)


def _set_in_place(tensor: Tensor, values: np.ndarray) -> None:
    if tensor.place.is_cpu_place():  # `set_value` would move the tensor to the device
        import paddle

        tensor.get_tensor().set(values, paddle.CPUPlace())
    else:
        tensor.set_value(values)


def _key(entry: TensorEntry) -> tuple[str, str, str]:
    return entry.name, entry.kind, entry.state


def _check_quantized(checkpoint: Checkpoint, params: list[tuple[str, Tensor]]) -> None:
    stored = set(checkpoint.names())
    for name, param in params:
        if name not in stored:
            continue
        is_stored, is_wanted = (
            dtype in _INTEGERS for dtype in (checkpoint.entry(name).dtype, dtype_of(param))
        )
        if is_stored and not is_wanted:
            raise CheckpointError(
                f"checkpoint {checkpoint.path} is quantized ({name} is {checkpoint.entry(name).dtype}), and "
                "this configuration has no Compress.Weights. It can be generated with, evaluated, served and "
                "exported by its own configuration (leave out -c FILE). Its weights cannot be trained: train "
                "adapters beside them (`ppfleetx finetune --from DIR -o Model.lora.rank=8`), or the "
                "checkpoint it was made from"
            )
        if is_wanted and not is_stored:
            raise CheckpointError(
                f"Compress.Weights describes a quantized checkpoint, and {checkpoint.path} is not quantized "
                f"({name} is {checkpoint.entry(name).dtype}); `ppfleetx quantize` makes one"
            )


def _of_same_shape(
    checkpoint: Checkpoint, params: list[tuple[str, Tensor]], other_vocabulary: bool
) -> list[tuple[str, Tensor]]:
    """Return the parameters that have the same shape in the checkpoint, and log a warning that names all
    others.

    Args:
        other_vocabulary: whether the vocabulary has another size in the checkpoint. If so, the embedding and
            the head are left out, even if padding makes their shapes equal.
    """
    same, other = [], []
    for name, param in params:
        entry = checkpoint.entry(name)
        try:
            _check_shape(checkpoint, entry, param.info)
            fits = not other_vocabulary or entry.vocab_dim is None
        except CheckpointError:
            fits = False
        if fits:
            same.append((name, param))
        else:
            other.append(name)
    if other:
        get_logger().warning(f"parameters of another shape keep their initial values: {', '.join(other)}")
    return same


def _check_names(
    checkpoint: Checkpoint,
    names: list[str],
    new: Collection[str],
    allow_missing: bool,
    allow_extra: bool | Collection[str],
) -> None:
    stored = checkpoint.names()
    known = {*stored, *new}
    missing = [name for name in names if name not in known]
    if missing and not allow_missing:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} lacks parameters of the model{_listed('missing', missing)}; "
            "with Engine.save_load.allow_missing=True they keep their initial values"
        )
    extra = [name for name in stored if name not in set(names)]
    ignored = extra if allow_extra is True else allow_extra or ()
    if any(name not in ignored for name in extra):
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds parameters the model does not have{_listed('extra', extra)}"
            "; with Engine.save_load.allow_extra=True they are left out"
        )
    for what, found in (("with initial values", missing), ("left out", extra)):
        if found:
            get_logger().warning(f"{counted(len(found), 'parameter')} {what}: {_first(found)}")


def _check_shape(checkpoint: Checkpoint, entry: TensorEntry, place: Any) -> None:
    stored, wanted, dim = tuple(entry.shape), tuple(place.global_shape), entry.vocab_dim
    if stored == wanted:
        return
    name = f"{entry.name} {entry.state}".rstrip()
    true_size = checkpoint.manifest.vocab_size
    differs = [axis for axis, (a, b) in enumerate(zip(stored, wanted, strict=False)) if a != b]
    if len(stored) == len(wanted) and differs == [dim]:
        if true_size is not None and true_size <= min(stored[dim], wanted[dim]):
            return  # only the padding differs; all true entries are there
        raise CheckpointError(
            f"{name} has {stored[dim]} vocabulary entries in checkpoint {checkpoint.path} and {wanted[dim]} "
            f"in the model; the checkpoint's vocabulary is {true_size if true_size else 'not recorded'}; "
            f"{_way_around(entry)}"
        )
    raise CheckpointError(
        f"{name} has shape {list(stored)} in checkpoint {checkpoint.path} and {list(wanted)} in the model; "
        f"{_way_around(entry)}"
    )


def _way_around(entry: TensorEntry) -> str:
    if entry.kind == OPTIMIZER:
        return "Engine.save_load.load_optim=False starts with a fresh optimizer"
    return "with Engine.save_load.allow_other_shapes=True it keeps its initial values"


def _listed(word: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"; {word} {len(names)}: {_first(names)}"


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
