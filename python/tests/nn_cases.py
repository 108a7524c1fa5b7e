"""What the tests of ironhorse.nn share: small odd models, and the same model in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from ironhorse.nn import Config, MoETransformer
from ironhorse.reference.init_moe import check_routing, init_weights, routed_batch
from ironhorse.reference.moe import MoE

# No two sizes equal where they could be confused; n_heads * head_dim is not hidden_dim. GQA 6/3.
ODD = Config(
    hidden_dim=14, n_layers=2, n_heads=6, n_kv_heads=3, n_experts=5, top_k_experts=2, vocab_size=53, max_seq_len=16,
    ffn_dim=11, head_dim=4, rope_base=100.0, rope_alpha=2.5,
)  # fmt: skip
# name: sizes, batch, seq, init of the reference
CASES = {
    "gqa": (ODD, 2, 5, "spread"),
    "e3k1": (replace(ODD, n_experts=3, top_k_experts=1), 2, 5, "spread"),
    "e8k8": (replace(ODD, n_experts=8, top_k_experts=8), 2, 5, "spread"),
    "idle": (ODD, 2, 5, "idle"),
    "single": (replace(ODD, top_k_experts=1), 2, 5, "single"),
    "tied": (ODD, 2, 5, "tied"),
    "one token": (ODD, 1, 1, "spread"),
    "tiny": (Config.tiny(), 2, 32, "spread"),
    "head 64": (replace(ODD, n_heads=2, n_kv_heads=1, head_dim=64), 2, 7, "spread"),
}
ALPHA = 0.3  # of the balancing loss: large, so that its gradient can be seen


def error(found: object, want: object) -> float:
    """The relative error by norm."""
    a, b = np.asarray(found, np.float64), np.asarray(want, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    size = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / size if size else float(np.linalg.norm(a))


def pair(config: Config, batch: int, seq: int, how: str, device: str = "auto", seed: int = 1):
    """The model in PyTorch, f32, ours with the same weights, inputs and targets."""
    theirs = init_weights(MoE(replace(config.sizes(), aux_alpha=ALPHA)), seed, how)
    x, y, _ = routed_batch(theirs, batch, seq, seed)
    check_routing(theirs, x, how)
    ours = MoETransformer(config, device=device)
    ours.load_tensors({name: param.detach().numpy() for name, param in theirs.named_parameters()})
    return theirs, ours, x, y


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def torch_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).requires_grad_()
