"""A loss with two parts: the loss of the tokens, and a penalty on large hidden states."""

from ppfleetx.config.registries import ARCHITECTURES, ArchitectureTraits
from ppfleetx.models.gpt.layers import Block
from ppfleetx.models.gpt.stages import gpt_stages
from ppfleetx.nn.aux_loss import AuxLoss, with_aux_loss


class PenalizedBlock(Block):
    """A block whose output is kept small: the mean square of each position costs 0.01."""

    def transform(self, hidden, *attention_arguments):
        hidden = super().transform(hidden, *attention_arguments)
        size = hidden.astype("float32").square().mean(-1)  # [s, b]
        return with_aux_loss(hidden, AuxLoss("trunk_size", size, weight=0.01))


@ARCHITECTURES.register("PenalizedGPT", traits=ArchitectureTraits(metrics=("trunk_size",)))
def penalized_gpt(cfg, factory):
    """GPT's stages with these blocks."""
    return gpt_stages(cfg, factory, block=PenalizedBlock)
