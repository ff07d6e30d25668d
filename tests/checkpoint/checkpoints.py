"""Small checkpoints for the tests."""

import numpy as np

from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.run_ownership import Ownership
from ppfleetx.checkpoint.slices import OPTIMIZER, TensorSlice, whole

OWN = "0123" * 8
RANK = "mp_00_sharding_00_pp_00"


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embedding.word_embeddings.weight": rng.standard_normal((12, 4)).astype(np.float32),
        "decoder.layers.0.mlp.fc1.bias": rng.standard_normal(16).astype(np.float32),
        "decoder.final_norm.weight": rng.standard_normal(4).astype(np.float32),
    }


def slices(seed=0):
    for name, array in arrays(seed).items():
        yield whole(name, array)
        yield whole(name, array * 2, kind=OPTIMIZER, state="moment1")
        yield whole(name, np.array([0.9], np.float32), kind=OPTIMIZER, state="beta1_pow")


def save(output_dir, step=1, epoch=0, *, tensors=None, state=None, run=OWN, keep_max=None, **options):
    """Save as a run does; one and the same unless `run` is another."""
    if run is not None:
        options["ownership"] = Ownership(run, keep_max, options.pop("spared", frozenset()))
    return save_checkpoint(
        output_dir,
        epoch=epoch,
        step=step,
        tensors=slices(step) if tensors is None else tensors,
        state={"step": step} if state is None else state,
        **options,
    )


def piece(name, array, offset=None, global_shape=None):
    """A slice of a float32 tensor."""
    shape = tuple(array.shape)
    return TensorSlice(
        name,
        "model",
        "F32",
        global_shape or shape,
        offset or (0,) * len(shape),
        shape,
        array,
    )
