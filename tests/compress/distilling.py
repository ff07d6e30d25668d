"""In a rank: a teacher for tests/compress/test_distill.py."""

from __future__ import annotations

from tests.parity.training import VOCAB, build


def save_teacher(place: str) -> None:
    """Write a checkpoint of a model that was only begun: half as deep and twice as wide as the students."""
    import paddle

    from ppfleetx.checkpoint.save import CheckpointManager
    from ppfleetx.checkpoint.tensors import model_slices

    sizes = {"Model.num_layers": 2, "Model.hidden_size": 64, "Global.seed": 7}
    with paddle.utils.unique_name.guard():
        cfg, ctx, runner = build({}, 1, "gpt", "sgd", 8, sizes)
        manager = CheckpointManager(place, ctx=ctx, vocab_size=VOCAB, config=cfg.model_dump(mode="json"))
        manager.save(epoch=0, step=1, tensors=list(model_slices(runner.named_parameters())), state={})
