"""Generate text with an exported model, using Paddle Inference."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import paddle
from paddle import inference

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import InferenceConfig, TensorRTConfig
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.deploy.export_dir import (
    BLOCKS_FILE,
    CPU_OPS_FILE,
    PROGRAM_FILE,
    QUANTIZED_OPS_FILE,
    TOKENIZER_DIRECTORY,
    WEIGHTS_FILE,
    ExportManifest,
    check_generation,
    check_onednn,
    open_export,
)
from ppfleetx.distributed.device import is_card, is_gpu, kind_of, waiting_for_each_operator
from ppfleetx.generation.decode_loop import Row
from ppfleetx.generation.decoding_session import pad_left
from ppfleetx.generation.generator import Batch, TextGenerator
from ppfleetx.generation.logits_processors import SMALLEST
from ppfleetx.generation.text_io import RowText
from ppfleetx.nn.cpu_ops import fused_blocks, quantized
from ppfleetx.nn.cpu_ops import ops as cpu_ops
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import back_process_by_huge_pages

_NO_TOKEN = -1
_GPU_POOL_MB = 256  # initial size; the pool grows
_GARBAGE, _GARBAGE_GB = "FLAGS_eager_delete_tensor_gb", 1 / 1024
"""A Paddle flag, and the value that we set on a CPU. Paddle frees unused tensors only when they add up to
this many GB. By default, Paddle hands over each unused tensor at once to another thread, which frees it.
Waking that thread for each tensor takes a tenth of the time of a forward pass over few tokens. With this
value, Paddle wakes the thread only about thirty times per pass."""


class InferenceEngine(TextGenerator):
    """Generates text with an exported model, through Paddle Inference. The results are the same as those of
    :class:`~ppfleetx.generation.generator.Generator` with the same model.

    Only one thread may generate at a time. :meth:`generate` calls ``on_text`` only when a batch is finished.

    Args:
        device: device type, optionally with an index (``gpu:1``).

    Raises:
        ConfigError: there is no exported model, it is damaged, or this machine cannot run it with
            ``options``.
    """

    def __init__(self, options: InferenceConfig, *, device: str = "cpu") -> None:
        directory, manifest = open_export(options.model_dir, verify=options.verify)
        if manifest.paddle_version != paddle.__version__:
            get_logger().warning(
                f"{directory} was exported by Paddle {manifest.paddle_version}, this is {paddle.__version__}"
            )
        tokenizer = Tokenizer.load(directory / TOKENIZER_DIRECTORY, eod_token=manifest.end_token)
        tokenizer.leave_out_tokens(manifest.vocab_size)
        super().__init__(tokenizer, manifest.max_positions)
        self.manifest: ExportManifest = manifest
        self._program = Program(directory, manifest.files, options, device)
        self._onednn = options.onednn

    def _continue(self, prompts: list[list[int]], batch: Batch, texts: list[RowText]) -> list[Row]:
        check_generation(batch.cfg)
        if self._onednn:
            check_onednn(batch.cfg, self.manifest.vocab_size)
        inputs = self._inputs(prompts, batch)
        new_ids = self._program.run(inputs)
        limits = inputs["max_new_tokens"].tolist()
        return [
            self._cut_row(ids, limit, batch.end_ids, text)
            for ids, limit, text in zip(new_ids.tolist(), limits, texts, strict=True)
        ]

    def _inputs(self, prompts: list[list[int]], batch: Batch) -> dict[str, np.ndarray]:
        cfg, rows = batch.cfg, [prompt for prompt, _ in batch.streams]
        tokens, padding = pad_left(prompts)
        greedy = batch.is_greedy
        return {
            "tokens": tokens[rows],
            "padding": padding[rows],
            "max_new_tokens": np.array(batch.max_new_tokens, dtype=np.int64)[rows],
            **self._random_numbers(batch, greedy=greedy),
            **self._ends(batch),
            "min_new_tokens": np.array([cfg.min_dec_len], dtype=np.int64),
            "repetition_penalty": np.array([cfg.repetition_penalty], dtype=np.float32),
            "temperature": np.array([1.0 if greedy else max(cfg.temperature, SMALLEST)], dtype=np.float32),
            "top_k": np.array([1 if greedy else min(cfg.top_k, self.manifest.vocab_size)], dtype=np.int64),
            "top_p": np.array([1.0 if greedy else max(cfg.top_p, SMALLEST)], dtype=np.float32),
            "most_guesses": np.array(
                [min(cfg.prompt_lookup_num_tokens, self.manifest.max_positions)], dtype=np.int64
            ),
        }

    def _random_numbers(self, batch: Batch, *, greedy: bool) -> dict[str, np.ndarray]:
        is_format_2 = "uniforms" in self.manifest.inputs
        if greedy:  # the program does not use them
            rows = np.ones([len(batch.streams), 1], np.float32)
            return {"uniforms": rows} if is_format_2 else {"exponentials": rows[..., None]}
        streams, steps = batch.random_streams(self.manifest.vocab_size), max(batch.max_new_tokens)
        if is_format_2:
            return {"uniforms": np.stack([stream.uniforms(steps) for stream in streams])}
        return {"exponentials": np.stack([stream.numbers(0, steps) for stream in streams])}

    def _ends(self, batch: Batch) -> dict[str, np.ndarray]:
        end_ids = np.array([*batch.end_ids] or [_NO_TOKEN], dtype=np.int64)
        if "end_id" in self.manifest.inputs:  # format 2
            if len(end_ids) > 1:
                raise ConfigError(
                    "the program of this export knows one end token; export the model again",
                    key="Generation.eos_token_id",
                    value=end_ids.tolist(),
                )
            return {"end_id": end_ids}
        return {"end_ids": end_ids}

    @staticmethod
    def _cut_row(ids: list[int], limit: int, end_ids: Collection[int], text: RowText) -> Row:
        """Return the generated token ids ``ids`` as a :class:`Row`, truncated after the first end token or
        stop string, or to ``limit`` tokens. The program's output after that is meaningless. ``text`` decodes
        the tokens and detects stop strings."""
        row = Row(limit)
        for token_id in ids:
            is_stopped = text.feed(token_id)
            if not row.add(token_id, is_last=token_id in end_ids or is_stopped):
                return row
        raise AssertionError("the program gives every row a token until it has ended")


class Program:
    """An exported program, loaded by Paddle Inference from the ``files`` in ``directory``."""

    def __init__(
        self, directory: Path, files: Collection[str], options: InferenceConfig, device: str
    ) -> None:
        self._device, is_cpu = device, not is_card(device)
        program = _program_file(files, options) if is_cpu else PROGRAM_FILE
        if is_cpu and _GARBAGE not in os.environ:
            paddle.set_flags({_GARBAGE: _GARBAGE_GB})
        self._predictor = inference.create_predictor(_configuration(directory, program, options, device))
        if is_cpu:
            back_process_by_huge_pages()  # for the weights; Paddle does not expose their address

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the program, and return t new tokens for each of b sequences, int64 ``[b, t]``. ``inputs``
        has an array for each input of the program, by name
        (:data:`ppfleetx.deploy.static.program.INPUTS`)."""
        for name in self._predictor.get_input_names():
            self._predictor.get_input_handle(name).copy_from_cpu(inputs[name])
        with waiting_for_each_operator(self._device):
            self._predictor.run()
        # Copy, because the next run overwrites the output buffer.
        return self._predictor.get_output_handle(self._predictor.get_output_names()[0]).copy_to_cpu()


def _configuration(directory: Path, program: str, options: InferenceConfig, device: str) -> inference.Config:
    """Create Paddle Inference's configuration for running the program file ``program`` on ``device``."""
    config = inference.Config(str(directory / program), str(directory / WEIGHTS_FILE))
    # no enable_memory_optim(): with it, Paddle 3.3.1 fails to create the predictor
    config.disable_glog_info()
    config.switch_ir_optim(options.ir_optim)
    number = int(device.partition(":")[2] or 0)
    if is_gpu(device):
        config.enable_use_gpu(_GPU_POOL_MB, number)
        if options.TensorRT is not None:
            _enable_tensorrt(config, options.TensorRT)
        return config
    if is_card(device):
        config.enable_custom_device(kind_of(device), number)
        return config
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(options.cpu_threads or int(os.environ.get("OMP_NUM_THREADS", 1)))
    if options.onednn:
        config.enable_mkldnn()
    else:
        config.disable_mkldnn()
    if options.precision == "bf16":
        config.enable_mkldnn_bfloat16()
    return config


def _program_file(files: Collection[str], options: InferenceConfig) -> str:
    """Choose the exported program file to run on a CPU: with oneDNN the standard program, otherwise the
    fastest one whose C++ operators are compiled on this machine."""
    if options.onednn:
        return PROGRAM_FILE
    cpu_ops.note_if_missing()
    if BLOCKS_FILE in files and fused_blocks.all_are_available():
        return BLOCKS_FILE
    if QUANTIZED_OPS_FILE in files and cpu_ops.are_available() and quantized.are_available():
        return QUANTIZED_OPS_FILE
    return CPU_OPS_FILE if CPU_OPS_FILE in files and cpu_ops.are_available() else PROGRAM_FILE


def _enable_tensorrt(config: inference.Config, options: TensorRTConfig) -> None:
    precisions = {
        "fp32": inference.PrecisionType.Float32,
        "fp16": inference.PrecisionType.Half,
        "int8": inference.PrecisionType.Int8,
    }
    config.enable_tensorrt_engine(
        workspace_size=options.workspace_size,
        max_batch_size=options.max_batch_size,
        min_subgraph_size=options.min_subgraph_size,
        precision_mode=precisions[options.precision],
        use_static=options.use_static,
        use_calib_mode=options.use_calib_mode,
    )
    if options.collect_shape:
        config.collect_shape_range_info(options.shape_range_info_filename)
    elif options.shape_range_info_filename is not None:
        config.enable_tuned_tensorrt_dynamic_shape(options.shape_range_info_filename, True)
