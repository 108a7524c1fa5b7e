"""A mixture-of-experts transformer in Python, layer by layer, computed in Rust.

    from ironhorse.nn import MoETransformer, TrainConfig, Trainer
    model = MoETransformer.tiny()
    logits = model.forward_ids([1, 2, 3, 4], batch=1, seq_len=4)          # (1, 4, 1000)
    loss = Trainer(model, TrainConfig(lr=1e-3, warmup_steps=10)).train_step(inputs, targets)

Layers have `forward`, which keeps what `backward` needs; `backward`, which takes the gradient of the result, adds the
true gradients to `.grad` of the parameters and returns the gradient of the input; and `parameters`. Weights and
activations are numpy arrays, row-major float32, as `.data` of a `Tensor`: look at them, change them in place. `device`
says where to compute, as in `ironhorse.ops`. This is for building, reading and checking models; the `ironhorse` command
trains the same model faster, because there a whole step is one program whose memory stays on the device.
"""

from __future__ import annotations

from .attention import MQAttention
from .config import Config
from .generation import (
    GreedySampling,
    SamplingStrategy,
    TemperatureSampling,
    TopKSampling,
    TopPSampling,
    generate,
    generate_greedy,
    generate_sample,
    generate_top_k,
    generate_top_p,
)
from .layers import Embedding, Layer, Linear, RMSNorm, SwiGLU
from .model import MoETransformer, TransformerBlock
from .moe import MoELayer, Router
from .tensor import DType, Tensor
from .train import AdamW, LRScheduler, TrainConfig, Trainer

__all__ = [
    "AdamW",
    "Config",
    "DType",
    "Embedding",
    "GreedySampling",
    "LRScheduler",
    "Layer",
    "Linear",
    "MQAttention",
    "MoELayer",
    "MoETransformer",
    "RMSNorm",
    "Router",
    "SamplingStrategy",
    "SwiGLU",
    "TemperatureSampling",
    "Tensor",
    "TopKSampling",
    "TopPSampling",
    "TrainConfig",
    "Trainer",
    "TransformerBlock",
    "generate",
    "generate_greedy",
    "generate_sample",
    "generate_top_k",
    "generate_top_p",
]
