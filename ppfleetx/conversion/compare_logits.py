"""Check a conversion: compute logits with our network and with transformers, and compare them."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.weights import ForeignCheckpoint, Weights, fitted, network_of
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.utils.process_env import import_paddle

TOLERANCE = 1e-4
_LENGTH = 32  # tokens per sequence
# transformers computes rotary angles in float32. At this position, their error is 2e-5.
_LAST_POSITION_OF_TRANSFORMERS = 256
_SCRIPT = Path(__file__).with_name("transformers_logits.py")


@dataclass(frozen=True)
class Probe:
    """Token ids and positions, both ``[b, s]``, on which the logits of two networks are compared."""

    tokens: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, model: ModelConfig) -> Probe:
        """Make a probe for a model. The tokens are random, with a fixed seed."""
        length = min(_LENGTH, model.max_position_embeddings)
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, length))
        return cls(tokens, _spread(length, model.max_position_embeddings - 1))

    def logits(self, weights: Weights) -> np.ndarray:
        """Compute our network's logits ``[b, s, vocabulary]`` on this probe."""
        model = network_of(weights.model, weights.place)
        return our_logits(weights, model, self.tokens, self.positions)

    def within_float32_angles(self) -> Probe:
        """Return a copy of this probe with smaller positions. transformers computes rotary angles in float32,
        which is inaccurate at large positions."""
        last = min(int(self.positions.max()), _LAST_POSITION_OF_TRANSFORMERS)
        return Probe(self.tokens, _spread(self.tokens.shape[1], last))


def our_logits(
    weights: Weights, model: ModelConfig, tokens: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """Compute the logits ``[b, s, vocabulary]`` of our network in float32."""
    import_paddle()
    import paddle

    from ppfleetx.checkpoint.state_dict import load_model
    from ppfleetx.models.gpt.stages import gpt_stages
    from ppfleetx.models.staged_model import StagedModel
    from ppfleetx.nn.layer_factory import LocalFactory
    from ppfleetx.nn.stage import canonical_parameters

    network = StagedModel(gpt_stages(model, LocalFactory()))
    network.eval()
    checkpoint = ForeignCheckpoint(Path(weights.place), weights.with_tensors(fitted(weights, model)))
    load_model(canonical_parameters(network).items(), checkpoint)
    with paddle.no_grad():
        logits = network(paddle.to_tensor(tokens), None if positions is None else paddle.to_tensor(positions))
    return logits.transpose([1, 0, 2]).numpy()[..., : model.vocab_size]


def difference(one: np.ndarray, two: np.ndarray, sources: str) -> float:
    """Return the largest absolute difference between two arrays of logits.

    Args:
        sources: the sources of the two arrays, worded to follow "the logits" in messages, such as
            ``of A and of B``.

    Raises CheckpointError if a logit is not finite, or if the difference exceeds
    ``TOLERANCE * max(1, largest magnitude in two)``.
    """
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        raise CheckpointError(
            f"the logits {sources} are not all finite numbers (float16 holds nothing beyond 65504)"
        )
    largest = float(np.abs(one - two).max())
    if not largest <= TOLERANCE * max(1.0, float(np.abs(two).max())):
        raise CheckpointError(f"the logits {sources} differ by {largest:.3g}")
    return largest


def transformers_logits(python: str, directory: Path, probe: Probe) -> np.ndarray:
    """Compute the logits of a Hugging Face directory with transformers, in a subprocess that runs the
    Python interpreter ``python``. Raises CheckpointError if the subprocess fails."""
    with tempfile.TemporaryDirectory() as scratch:
        given, answer = Path(scratch, "probe.npz"), Path(scratch, "logits.npy")
        np.savez(given, tokens=probe.tokens, positions=probe.positions)
        # torch and Paddle cannot be in the same process.
        command = [python, str(_SCRIPT), str(directory), str(given), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CheckpointError(f"{python} cannot be run: {error.strerror}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(f"transformers failed in {python}: {last}")
        return np.load(answer)


def _spread(length: int, last: int) -> np.ndarray:
    # Positions spread over the whole context reveal errors in low rotary frequencies, and in late rows of
    # a position embedding.
    return np.stack([np.arange(length), np.linspace(0, last, length).astype(np.int64)])
