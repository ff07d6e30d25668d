"""``GPT2LMHeadModel`` and ``GPT2Tokenizer`` with the methods of MindFormers' classes of the same names.

docs/api.md lists the cases in which results differ from MindFormers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from ppfleetx.api.model import GPT, Tokens
from ppfleetx.commands.resolve_model import resolve_model
from ppfleetx.config.errors import CheckpointError, DataError, MissingDataError
from ppfleetx.conversion.hub import local_directory
from ppfleetx.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import paddle

Encoded = dict[str, Any]
"""The result of a tokenizer: a dict with ``input_ids``, ``attention_mask`` and ``token_type_ids``."""
_TENSORS = (None, "np", "pd", "ms")


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a loaded network under MindFormers' names. ``seq_length`` is the maximum sequence length."""

    seq_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int


class GPT2LMHeadModel:
    """A loaded model with the methods of MindFormers' ``GPT2LMHeadModel``. Calling the model returns logits
    or, in training mode, the loss.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        sizes = model.config
        self.config = GPT2Config(
            sizes.max_position_embeddings,
            sizes.vocab_size,
            sizes.hidden_size,
            sizes.num_layers,
            sizes.num_attention_heads,
        )
        self._trains = False

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load a model from a directory in ppfleetx's, Hugging Face's or FleetX's format.

        Raises:
            UserError: there is no model in the directory.
        """
        return cls(GPT.from_pretrained(directory))

    def set_train(self, mode: bool = True) -> Self:
        """Switch training mode on or off. In training mode, calling the model returns the loss, and dropout
        is active."""
        self._trains = mode
        self.model.train(mode)
        return self

    def __call__(self, input_ids: Tokens) -> paddle.Tensor:
        """Compute float32 logits ``[b, s, V]`` of token ids ``[b, s]`` (b sequences, s tokens, V vocabulary).
        In training mode, compute the mean next-token loss of ids ``[b, s + 1]`` instead, a scalar.

        End-of-document tokens at the end of a sequence are treated as padding and do not count in the loss.

        Raises:
            DataError: an id is outside the model's vocabulary, a sequence is longer than ``seq_length``, or
                no token counts in the loss.
        """
        if not self._trains:
            return self.model(input_ids)
        import paddle
        import paddle.nn.functional as F

        ids = np.atleast_2d(np.asarray(input_ids))
        counts = _is_text(ids, self._pad_id)[:, 1:]
        if not counts.any():
            raise DataError("no token counts in the loss: the sequences are padding, or of one token")
        labels = self.model._ids(ids[:, 1:])
        logits = self.model(ids[:, :-1])
        each = F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").squeeze(-1)
        mask = paddle.to_tensor(counts.astype(np.float32))
        return (each * mask).sum() / mask.sum()

    @property
    def _pad_id(self) -> int | None:
        return None if self.model.tokenizer is None else self.model.tokenizer.eod_id

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Generate continuations of one or more prompts, each a string or token ids. Calls
        :meth:`GPT.generate`, which describes the arguments and results."""
        return self.model.generate(input_ids, **options)

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write the weights as a checkpoint below ``directory``, with :meth:`GPT.save`. Returns the
        checkpoint's directory. Raises CheckpointError if the checkpoint exists already or cannot be
        written."""
        return self.model.save(directory)


def _is_text(ids: np.ndarray, pad_id: int | None) -> np.ndarray:
    """Return a mask ``[b, s]``: False for padding at the end of a sequence, True elsewhere."""
    if pad_id is None:
        return np.ones(ids.shape, bool)
    from_end = np.flip(ids != pad_id, axis=1)
    return np.flip(np.logical_or.accumulate(from_end, axis=1), axis=1)


class GPT2Tokenizer:
    """A tokenizer with the methods of MindFormers' ``GPT2Tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load a tokenizer from ``directory``, which holds tokenizer files, a model or a run. Raises
        DataError if the directory has no tokenizer."""
        directory = local_directory(directory)
        try:
            return cls(Tokenizer.load(directory))
        except MissingDataError as error:
            with ExitStack() as stack:
                try:
                    place = resolve_model(directory, stack, with_config=False)
                except CheckpointError:
                    raise error from None  # the directory has no model either, so raise the first error
                if place.tokenizer is None:
                    raise
                return cls(Tokenizer.load(place.tokenizer))

    @property
    def pad_token_id(self) -> int:
        """The id of the end-of-document token, which is also used for padding."""
        return self.tokenizer.eod_id

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = False,
        padding: Literal["max_length"] | bool = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: Literal["np", "pd", "ms"] | None = None,
    ) -> Encoded:
        """Encode one or more strings. Returns ``input_ids``, ``attention_mask`` and ``token_type_ids``, as a
        tokenizer of transformers does.

        Args:
            text: a string or a list of strings. For a list, or with ``return_tensors``, each result begins
                with a batch dimension.
            add_special_tokens: whether to put the end-of-document token before and after each string.
            padding: ``max_length`` pads each sequence at its end to ``max_length`` tokens; False does not
                pad.
            max_length: the maximum number of tokens per string, special tokens included.
            truncation: whether to cut off the end of a longer string. If False, a longer string raises
                DataError.
            return_tensors: ``np`` for NumPy arrays, ``pd`` (or ``ms``) for Paddle tensors; None: lists.

        Raises:
            DataError: sequences have different lengths and are not padded, a string is longer than
                ``max_length``, or an argument has an unknown value.
        """
        if return_tensors not in _TENSORS or padding not in (False, "max_length"):
            raise DataError(
                f"padding is 'max_length' or False, return_tensors one of {_TENSORS[1:]} or None; given "
                f"{padding!r} and {return_tensors!r}"
            )
        if padding and max_length is None:
            raise DataError("padding='max_length' needs max_length")
        texts = [text] if isinstance(text, str) else list(text)
        rows = [self._row(one, add_special_tokens, max_length, truncation) for one in texts]
        width = max_length if padding else max(map(len, rows), default=0)
        if not padding and any(len(row) != width for row in rows):
            raise DataError("texts of several lengths need padding='max_length'")
        pad = self.pad_token_id
        found = {
            "input_ids": [row + [pad] * (width - len(row)) for row in rows],
            "attention_mask": [[1] * len(row) + [0] * (width - len(row)) for row in rows],
            "token_type_ids": [[0] * width for _ in rows],
        }
        if return_tensors is None:
            return found if not isinstance(text, str) else {name: rows[0] for name, rows in found.items()}
        arrays = {name: np.asarray(values, np.int64) for name, values in found.items()}
        if return_tensors == "np":
            return arrays
        import paddle

        return {name: paddle.to_tensor(array) for name, array in arrays.items()}

    def _row(self, text: str, special: bool, max_length: int | None, truncation: bool) -> list[int]:
        ids = self.tokenizer.encode(text)
        ends = 2 if special else 0
        if max_length is not None and len(ids) + ends > max_length:
            if not truncation:
                raise DataError(
                    f"a text has {len(ids) + ends} tokens, more than max_length {max_length}; "
                    "truncation=True cuts it"
                )
            ids = ids[: max(max_length - ends, 0)]
        return [self.pad_token_id, *ids, self.pad_token_id] if special else ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str | list[str]:
        """Decode a sequence of token ids into a string, or a batch of sequences into a list of strings."""
        rows = np.asarray(ids)
        if rows.ndim <= 1:
            return self.tokenizer.decode(rows, skip_special_tokens=skip_special_tokens)
        return [self.tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the tokenizer's files into ``directory``."""
        self.tokenizer.save(directory)
