"""The exported program: the model, its key/value cache and the whole decoding loop, as one function of
tensors. Generation options that users choose at run time are inputs of the program.

Shape letters: b number of sequences, n length of the longest prompt, t number of new tokens, V vocabulary
size.
"""

from __future__ import annotations

import contextlib
import filecmp
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.jit.dy2static import convert_call_func, program_translator
from paddle.static import InputSpec

from ppfleetx.deploy.export_dir import BLOCKS_FILE, CPU_OPS_FILE, QUANTIZED_OPS_FILE
from ppfleetx.deploy.static.cache import LoopCache, PreallocatedCache, with_room
from ppfleetx.deploy.static.experts import grouped_matrices_of
from ppfleetx.deploy.static.linear import (
    Matrix,
    QuantizedProgramMatrix,
    begin,
    make_weights,
    matrices_of,
    program_blocks,
    use_panels,
)
from ppfleetx.deploy.static.sampling import (
    FEWEST_ALIKE,
    accept,
    drafts_after,
    last_occurrence,
    next_width,
    nucleus_by_buckets,
)
from ppfleetx.generation.decoding_session import NextTokenModel
from ppfleetx.generation.fused_blocks import FusedBlocks
from ppfleetx.generation.gumbel_sampling import draw
from ppfleetx.generation.kv_cache import ROOM
from ppfleetx.generation.logits_processors import (
    forbid,
    is_any_of,
    keep_top_p,
    penalize_repetition,
    scatter_by_id,
)
from ppfleetx.nn.attention import LatentAttention
from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.nn.cpu_ops import quantized
from ppfleetx.nn.cpu_ops.fused_blocks import BlockWeights


@contextlib.contextmanager
def quick_conversion() -> Iterator[None]:
    """Context manager that makes Paddle's ``to_static`` faster by caching. For example, each method is
    converted once per class, not once per layer object."""
    with contextlib.ExitStack() as stack:
        cache = getattr(program_translator, "_FUNCTION_CACHE", None)
        if hasattr(cache, "convert_with_cache"):
            convert = cache.convert_with_cache
            once = lambda function: convert(_plain(function))  # noqa: E731
            stack.enter_context(mock.patch.object(cache, "convert_with_cache", once))
        if hasattr(convert_call_func, "is_unsupported"):
            search = _remembered(convert_call_func.is_unsupported)
            stack.enter_context(mock.patch.object(convert_call_func, "is_unsupported", search))
        yield


def _remembered(search: Callable[[Any], bool]) -> Callable[[Any], bool]:
    known: dict[Any, bool] = {}

    def look_up(function: Any) -> bool:
        plain = type(function) if isinstance(function, nn.Layer) else _plain(function)
        if not (inspect.isfunction(plain) or inspect.isclass(plain)):
            return search(function)
        if plain not in known:
            known[plain] = search(function)
        return known[plain]

    return look_up


def _plain(function: Any) -> Any:
    return function.__func__ if inspect.ismethod(function) else function


INPUTS: tuple[tuple[str, str, tuple[int | None, ...]], ...] = (
    ("tokens", "int64", (None, None)),  # [b, n] prompts, padded on the left with one of their tokens
    ("padding", "int64", (None,)),  # [b] number of padding columns
    ("max_new_tokens", "int64", (None,)),  # [b] at least 1
    ("exponentials", "float32", (None, None, None)),  # [b, t, race_size(V)] random; not used if top_k is 1
    ("end_ids", "int64", (None,)),  # tokens that end a sequence, at least one; -1 for none
    ("min_new_tokens", "int64", (1,)),
    ("repetition_penalty", "float32", (1,)),
    ("temperature", "float32", (1,)),
    ("top_k", "int64", (1,)),  # 1: the likeliest token (greedy search); 0: all
    ("top_p", "float32", (1,)),
    # Maximum number of draft tokens per pass. Used only for a single sequence, with greedy search and without
    # repetition_penalty. The name is that of the input in existing exports.
    ("most_guesses", "int64", (1,)),
)
"""Name, type and shape of each input of the program, in argument order."""


def save_program(
    next_token: NextTokenModel, max_positions: int, path: Path, *, use_panels: bool = True
) -> None:
    """Export the model and the decoding loop to ``{path}.json`` and ``{path}.pdiparams``. The model must be
    whole, not sliced over ranks, and cannot be trained afterwards.

    Args:
        use_panels: whether the program may copy weight matrices into a layout that is faster on a CPU. With
            True, a second program that uses our C++ operators is also exported, if they are compiled.
    """
    program = GenerationProgram(next_token, max_positions, use_panels=use_panels)
    program.eval()
    _save(program, path)
    if use_panels and cpu_ops.are_available() and (quantized.are_available() or not program.is_quantized):
        program.use_cpu_ops()
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            _save(program, Path(directory) / path.name)
            weights = f"{path.name}.pdiparams"
            if not filecmp.cmp(path.with_name(weights), Path(directory) / weights, shallow=False):
                raise RuntimeError("the two programs of an export do not have the same weights")
            (Path(directory) / f"{path.name}.json").replace(path.with_name(program.cpu_ops_file_name))


def _save(program: GenerationProgram, path: Path) -> None:
    spec = [InputSpec(list(shape), dtype, name) for name, dtype, shape in INPUTS]
    with warnings.catch_warnings():
        # Paddle warns about variables that are used only inside a branch, and about tensors without a device.
        warnings.simplefilter("ignore", UserWarning)
        with quick_conversion():
            static = paddle.jit.to_static(program, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(path))
            static.forward.rollback()


class GenerationProgram(nn.Layer):
    """The layer that is exported: it maps a batch of prompts to their continuations. Tokens after the end of
    a sequence are meaningless. The constructor changes the model: it replaces linear and expert layers by
    exportable ones.

    Args:
        use_panels: whether the program may copy weight matrices into a layout that is faster on a CPU.
    """

    def __init__(self, next_token: NextTokenModel, max_positions: int, *, use_panels: bool) -> None:
        super().__init__()
        self.vocab_size, self.max_positions = next_token.vocab_size, max_positions
        # Assigned, so that the program's weights include the model's parameters and buffers.
        self.model = next_token.model
        for layer in self.model.sublayers():
            if isinstance(layer, LatentAttention):
                layer.keep_projections()  # in buffers, which are constants of the program
        self.matrices, self.use_panels, self.by_cpu_ops = matrices_of(self.model), use_panels, False
        self.grouped = grouped_matrices_of(self.model)
        self.blocks: FusedBlocks | None = None
        self.block_weights: BlockWeights | None = None
        self.head: Matrix | None = None
        if next_token.head_matrix is not None:
            self.register_buffer("head_matrix", next_token.head_matrix)
            self.head = Matrix(self.head_matrix)
            if next_token.quantized_head is not None:
                self.register_buffer("head_scale", next_token.quantized_head.scale)
                self.head = QuantizedProgramMatrix(next_token.quantized_head)
            self.matrices.append(self.head)

    @property
    def is_quantized(self) -> bool:
        return any(isinstance(matrix, QuantizedProgramMatrix) for matrix in self.matrices)

    @property
    def cpu_ops_file_name(self) -> str:
        """The file name under which this program is exported after :meth:`use_cpu_ops`. It depends on which
        C++ operators the program uses."""
        if self.blocks is not None:
            return BLOCKS_FILE
        return QUANTIZED_OPS_FILE if self.is_quantized else CPU_OPS_FILE

    def use_cpu_ops(self) -> None:
        """Let the program use our C++ operators where they support the model."""
        self.by_cpu_ops = True
        for matrix in (*self.matrices, *self.grouped):
            matrix.by_cpu_ops = True
        self.blocks = program_blocks(self.model.stages[1:-1])

    def forward(
        self,
        tokens: paddle.Tensor,
        padding: paddle.Tensor,
        max_new_tokens: paddle.Tensor,
        exponentials: paddle.Tensor,
        end_ids: paddle.Tensor,
        min_new_tokens: paddle.Tensor,
        repetition_penalty: paddle.Tensor,
        temperature: paddle.Tensor,
        top_k: paddle.Tensor,
        top_p: paddle.Tensor,
        most_guesses: paddle.Tensor,
    ) -> paddle.Tensor:
        """Generate tokens for a batch of prompts. Returns the new tokens, int64 ``[b, t]``, where t is at
        most the largest of ``max_new_tokens``. The arguments are described at :data:`INPUTS`."""
        # Not in a branch, so that the weights are prepared only once, when the program is loaded.
        begin([*self.matrices, *self.grouped])
        use_panels(self.matrices, [])
        self.block_weights = make_weights(self.blocks)
        step = paddle.zeros([1], "int64")
        length = tokens.shape[1]
        limits = max_new_tokens
        padding = padding.unsqueeze(-1)
        start = padding.astype("int32")
        positions = paddle.maximum(paddle.arange(length).unsqueeze(0) - padding, paddle.zeros_like(padding))
        rules = (end_ids, min_new_tokens, repetition_penalty)
        sampling = (exponentials, temperature, top_k, top_p)
        logits, past = self._run_model((tokens, positions, start.expand_as(positions)), LoopCache([]))
        token = self._choose(self._process(logits, tokens, step, *rules), step, *sampling)
        # Outside of branches, so that panels are computed only once, when the program is loaded.
        panels = [matrix.make_panels() for matrix in self.matrices] if self.use_panels else []
        if tokens.shape[0] > 1:
            history = self._decode(tokens, token, past, padding, limits, rules, sampling, panels)
        else:
            history = self._decode_one(
                tokens, token, past, limits, rules, sampling, most_guesses, panels
            ).unsqueeze(0)
        return history[:, length:]

    def _decode(
        self,
        tokens: paddle.Tensor,
        token: paddle.Tensor,
        past: list[paddle.Tensor],
        padding: paddle.Tensor,
        limits: paddle.Tensor,
        rules: tuple[paddle.Tensor, ...],
        sampling: tuple[paddle.Tensor, ...],
        panels: Sequence[paddle.Tensor],
    ) -> paddle.Tensor:
        """Run the decoding loop for several sequences. Returns prompts and new tokens, int64 [b, prompt
        length + new tokens].

        Args:
            token: the first new token of each sequence, ``[b]``.
            rules: the inputs end_ids, min_new_tokens and repetition_penalty (see :data:`INPUTS`).
            sampling: the inputs exponentials (random numbers), temperature, top_k and top_p.
            panels: copies of the weight matrices in a layout that makes matmuls faster. If empty, the
                original matrices are used.
        """
        use_panels(self.matrices, panels)
        end_ids = rules[0]
        length = tokens.shape[1]
        step = paddle.zeros([1], "int64")
        history = paddle.concat([tokens, token.unsqueeze(-1)], axis=1)
        finished = paddle.logical_or(is_any_of(token, end_ids), limits <= 1)
        while paddle.logical_not(finished.all()):
            past = with_room(past, ROOM)
            end = past[0].shape[2]
            while paddle.logical_and(paddle.logical_not(finished.all()), length + step < end):
                logits, past = self._append(token, past, length + step, padding)
                step = step + 1
                token = self._choose(self._process(logits, history, step, *rules), step, *sampling)
                history = paddle.concat([history, token.unsqueeze(-1)], axis=1)
                is_last = paddle.logical_or(is_any_of(token, end_ids), limits <= step + 1)
                finished = paddle.logical_or(finished, is_last)
        return history

    def _append(
        self, token: paddle.Tensor, past: list[paddle.Tensor], column: paddle.Tensor, padding: paddle.Tensor
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        """Run the model on one new token of each sequence, ``token [b]``. The keys and values of these tokens
        are stored at index ``column [1]`` of the cache ``past``. Returns the next logits ``[b, V]`` and the
        new cache."""
        # While other sequences continue, a finished one must not exceed the last position.
        last_position = paddle.full_like(padding, self.max_positions - 1)
        position = paddle.minimum(column - padding, last_position)
        columns = paddle.arange(past[0].shape[2])
        visible = paddle.logical_and(columns >= padding, columns <= column)
        return self._run_model((token.unsqueeze(-1), position), PreallocatedCache(past, column, visible))

    def _decode_one(
        self,
        tokens: paddle.Tensor,
        token: paddle.Tensor,
        past: list[paddle.Tensor],
        limits: paddle.Tensor,
        rules: tuple[paddle.Tensor, ...],
        sampling: tuple[paddle.Tensor, ...],
        max_drafts: paddle.Tensor,
        panels: Sequence[paddle.Tensor],
    ) -> paddle.Tensor:
        """Run the decoding loop for a single sequence without padding. Returns the prompt and the new tokens
        as one vector.

        Args:
            token: the first new token, ``[1]``.
            limits: the maximum number of new tokens, ``[1]``.
            rules: the inputs end_ids, min_new_tokens and repetition_penalty (see :data:`INPUTS`).
            sampling: the inputs exponentials (random numbers), temperature, top_k and top_p.
            max_drafts: maximum number of draft tokens per pass for prompt lookup, ``[1]``.
            panels: copies of the weight matrices in a layout that makes matmuls faster. If empty, the
                original matrices are used.
        """
        end_ids, min_new_tokens, repetition_penalty = rules
        top_k = sampling[2]
        # Prompt lookup is only for greedy search without a repetition penalty.
        max_drafts = paddle.where(
            paddle.logical_and(top_k == 1, repetition_penalty == 1.0),
            max_drafts,
            paddle.zeros_like(max_drafts),
        )
        length = tokens.shape[1]
        most = length + limits.max()
        history = paddle.concat([tokens.flatten(), token])
        width = paddle.minimum(paddle.ones_like(max_drafts), max_drafts)
        finished = paddle.logical_or(is_any_of(token, end_ids), limits <= 1).all()
        while paddle.logical_not(finished):
            size = history.shape[0]
            place, alike = last_occurrence(history)
            # Leave room for the token after the draft tokens.
            count = paddle.minimum(width, most - size - 1)
            count = paddle.where(size - length >= min_new_tokens, count, paddle.zeros_like(count))
            if paddle.logical_and(alike >= FEWEST_ALIKE, count > 0):
                drafts = drafts_after(history, place, count)
                likeliest, past = self._verify_drafts(history, drafts, past, panels)
                right = accept(likeliest, drafts)
                new = likeliest[: right + 1]
                past = [tensor[:, :, : size + right] for tensor in past]
                width = next_width(width, right, max_drafts)
            else:
                new, past = self._one_more(history, past, size - length, rules, sampling)
            # An accepted draft token may be an end token; drop all tokens after it.
            is_end = is_any_of(new, end_ids)
            ends = paddle.where(is_end, paddle.arange(new.shape[0]), paddle.full_like(new, size))
            history = paddle.concat([history, new[: ends.min() + 1]])
            finished = paddle.logical_or(is_end.any(), history.shape[0] >= most)
        return history

    def _verify_drafts(
        self,
        history: paddle.Tensor,
        drafts: paddle.Tensor,
        past: list[paddle.Tensor],
        panels: Sequence[paddle.Tensor],
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        """Run the last token of ``history`` and k draft tokens in one pass. Returns the likeliest next token
        after each of these tokens, ``[1 + k]``, and the new cache."""
        use_panels(self.matrices, panels, 1)
        tokens = paddle.concat([history[-1:], drafts])
        positions = history.shape[0] - 1 + paddle.arange(tokens.shape[0])
        state = (tokens.unsqueeze(0), positions.unsqueeze(0))
        logits, past = self._run_model(state, LoopCache(past), last_only=False)
        return logits.argmax(-1), past

    def _one_more(
        self,
        history: paddle.Tensor,
        past: list[paddle.Tensor],
        step: paddle.Tensor,
        rules: tuple[paddle.Tensor, ...],
        sampling: tuple[paddle.Tensor, ...],
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        use_panels(self.matrices, [])
        step = paddle.full([1], step, "int64")
        position = paddle.full([1, 1], history.shape[0] - 1, "int64")
        logits, past = self._run_model((history[-1:].unsqueeze(0), position), LoopCache(past))
        return self._choose(self._process(logits, history.unsqueeze(0), step, *rules), step, *sampling), past

    def _run_model(
        self, state: tuple[paddle.Tensor, ...], cache: LoopCache | PreallocatedCache, last_only: bool = True
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        """Run the model once. Returns the logits and the new cache.

        Args:
            state: token ids and position ids ``[b, s]``. For prompts also ``document_start [b, s]``, the
                number of padding tokens before each prompt.
            last_only: whether to return only the logits after the last tokens, ``[b, V]``. Otherwise there
                must be one sequence, and the logits are ``[s, V]``.
        """
        embedding, *trunk, head = self.model.stages
        position_ids = state[1]
        state = embedding(state, cache)
        if self.blocks is not None and cache.past:
            hidden, cache.extended = self.blocks.run_with(self.block_weights, state[0], position_ids, cache)
        else:
            for stage in trunk:
                state = stage(state, cache)
            hidden = state[0]
        last = hidden[-1] if last_only else hidden.squeeze(1)
        logits = (
            head((last,))[:, : self.vocab_size] if self.head is None else head.capped(self.head.linear(last))
        )
        return logits, cache.extended

    def _process(
        self,
        logits: paddle.Tensor,
        history: paddle.Tensor,
        step: paddle.Tensor,
        end_ids: paddle.Tensor,
        min_new_tokens: paddle.Tensor,
        repetition_penalty: paddle.Tensor,
    ) -> paddle.Tensor:
        """Apply the repetition penalty, and forbid end tokens before the minimum length."""
        is_early = step < min_new_tokens
        # One branch for both rules, because each branch costs about a millisecond.
        if paddle.logical_or(is_early, repetition_penalty != 1.0):
            logits = penalize_repetition(logits, history, repetition_penalty)
            logits = forbid(logits, paddle.where(is_early, end_ids, paddle.full_like(end_ids, -1)))
        return logits

    def _choose(
        self,
        logits: paddle.Tensor,
        step: paddle.Tensor,
        exponentials: paddle.Tensor,
        temperature: paddle.Tensor,
        top_k: paddle.Tensor,
        top_p: paddle.Tensor,
    ) -> paddle.Tensor:
        if top_k == 1:
            token = logits.argmax(-1)
        else:
            token = self._sample(
                logits / temperature, paddle.index_select(exponentials, step, axis=1).squeeze(1), top_k, top_p
            )
        return token

    def _sample(
        self, logits: paddle.Tensor, exponentials: paddle.Tensor, top_k: paddle.Tensor, top_p: paddle.Tensor
    ) -> paddle.Tensor:
        """Sample a token for each sequence from ``logits [b, V]`` with top-k and top-p, as
        :func:`~ppfleetx.generation.logits_processors.candidates` and ``draw`` do outside of programs."""
        if paddle.logical_and(top_k > 0, top_k < self.vocab_size):
            values, ids = paddle.topk(logits, top_k, axis=-1)
            kept = keep_top_p(F.softmax(values, axis=-1), _no_limit_at_one(top_p))
            weights = scatter_by_id(kept, ids, self.vocab_size)
        else:
            weights = F.softmax(logits, axis=-1)
            if self.by_cpu_ops:
                weights = cpu_ops.nucleus(weights, _no_limit_at_one(top_p))
            elif top_p < 1.0:
                weights = nucleus_by_buckets(weights, top_p)
        return draw(weights, exponentials)


def _no_limit_at_one(top_p: paddle.Tensor) -> paddle.Tensor:
    """Return ``top_p``, or 2 if it is at least 1, so that top-p keeps all tokens. A limit of 1 could drop
    tokens, because rounding can make the cumulative sum of probabilities reach 1 too early."""
    return paddle.where(top_p < 1.0, top_p, paddle.full_like(top_p, 2.0))
