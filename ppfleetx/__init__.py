"""ppfleetx: pretrain, finetune, evaluate, generate with, export and serve GPT models on PaddlePaddle fleet.

Importing the package imports neither Paddle nor anything else that is slow.
"""

__version__ = "0.1.0"
