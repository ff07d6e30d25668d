"""Logits of a converted model: ours, those of its Hugging Face files, and whether they agree."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.weights import ForeignCheckpoint, Weights, fitted
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.files import read_hf_config, read_stored
from ppfleetx.conversion.reference import hf_logits
from ppfleetx.utils.process_env import import_paddle

TOLERANCE = 1e-4
# transformers computes angles in float32: at this position they are off by 2e-5.
_LAST_POSITION_OF_TRANSFORMERS = 256
_SCRIPT = Path(__file__).with_name("ask_transformers.py")


@dataclass(frozen=True)
class Probe:
    """Tokens to compute logits for, [b, s], and their positions, [b, s].

    One sequence has its tokens side by side. The other has them spread out over all positions the model may
    see, because a difference in slow frequencies or in later rows of a table shows there alone.
    """

    tokens: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, model: ModelConfig, length: int, seed: int) -> Probe:
        """Random tokens for a model."""
        length = min(length, model.max_position_embeddings)
        tokens = np.random.default_rng(seed).integers(0, model.vocab_size, (2, length))
        return cls(tokens, _positions(length, model.max_position_embeddings - 1))

    def compare(
        self, found: np.ndarray, directory: Path, rounded_to: str | None, python_with_transformers: str | None
    ) -> float:
        """Largest difference of `found`, our logits of this probe, from those of a Hugging Face directory.

        Args:
            found: [b, s, vocabulary].
            directory: its configuration and tensors.
            rounded_to: element type that its tensors are rounded to first.
            python_with_transformers: as in `run.check_logits`; its answer is compared with that of NumPy.

        Raises:
            CheckpointError: they differ.
        """
        config, stored = read_hf_config(directory), read_stored(directory)
        expected = hf_logits(
            config,
            stored.tensors,
            self.tokens,
            positions=self.positions,
            rounded_to=rounded_to,
            formats=stored.formats,
        )
        difference = _difference(found, expected, f"of {directory} and of our network")
        if python_with_transformers is None:
            return difference
        if stored.is_paddle:
            raise CheckpointError(
                f"transformers does not read {directory}, which is of PaddleNLP or PaddleFormers"
            )
        last = min(int(self.positions.max()), _LAST_POSITION_OF_TRANSFORMERS)
        near = Probe(self.tokens, _positions(self.tokens.shape[1], last))
        theirs = _ask(python_with_transformers, directory, near)
        ours = hf_logits(config, stored.tensors, near.tokens, positions=near.positions)
        return max(difference, _difference(ours, theirs, f"of {directory} in NumPy and in transformers"))


def our_logits(
    weights: Weights, model: ModelConfig, tokens: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """Logits [b, s, vocabulary] of our network in float32, on one card."""
    import_paddle()
    import paddle

    from ppfleetx.checkpoint.tensors import load_model
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged import StagedModel
    from ppfleetx.nn.factory import LocalFactory
    from ppfleetx.nn.stage import canonical_parameters

    network = StagedModel(gpt_stages(model, LocalFactory()))
    network.eval()
    checkpoint = ForeignCheckpoint(Path(weights.place), weights.with_tensors(fitted(weights, model)))
    load_model(canonical_parameters(network).items(), checkpoint)
    with paddle.no_grad():
        logits = network(paddle.to_tensor(tokens), None if positions is None else paddle.to_tensor(positions))
    return logits.transpose([1, 0, 2]).numpy()[..., : model.vocab_size]


def _positions(length: int, last: int) -> np.ndarray:
    return np.stack([np.arange(length), np.linspace(0, last, length).astype(np.int64)])


def _difference(one: np.ndarray, two: np.ndarray, whose: str) -> float:
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        raise CheckpointError(
            f"the logits {whose} are not all finite numbers (float16 holds nothing beyond 65504)"
        )
    difference = float(np.abs(one - two).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(two).max())):
        raise CheckpointError(f"the logits {whose} differ by {difference:.3g}")
    return difference


def _ask(python: str, directory: Path, probe: Probe) -> np.ndarray:
    """Logits by transformers, in a process of its own: torch and Paddle need not live in one."""
    with tempfile.TemporaryDirectory() as scratch:
        given, answer = Path(scratch, "probe.npz"), Path(scratch, "logits.npy")
        np.savez(given, tokens=probe.tokens, positions=probe.positions)
        command = [python, str(_SCRIPT), str(directory), str(given), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CheckpointError(f"{python} cannot be run: {error.strerror}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(f"transformers could not be asked with {python}: {last}")
        return np.load(answer)
