"""Trains a small mixture of experts on the bytes of a sentence, and shows which experts the tokens go to.

Usage:
    python examples/python/moe_nn.py [--steps N] [--device auto|cpu|cuda]
"""

from __future__ import annotations

import argparse

import numpy as np
from ironhorse.nn import Config, MoETransformer, TrainConfig, Trainer

TEXT = "the iron horse runs on rails of steel; the horse of hay runs on the green; "
SEQ = 32


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Trains on the bytes of a sentence. Returns the loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)

    config = Config(
        hidden_dim=64, n_layers=2, n_heads=4, n_kv_heads=1, n_experts=4, top_k_experts=2, vocab_size=128,
        max_seq_len=128, ffn_dim=128, head_dim=16, rope_alpha=1.0,
    )  # fmt: skip
    model = MoETransformer(config, seed=1, device=options.device)
    print(f"{config.total_params():,} parameters, {config.active_params():,} of them for a token")
    trainer = Trainer(model, TrainConfig(lr=5e-3, warmup_steps=10, total_steps=options.steps))

    text = np.frombuffer((TEXT * 4).encode(), np.uint8).astype(np.int64)
    rng, losses = np.random.default_rng(2), []
    for step in range(options.steps):
        starts = rng.integers(0, len(text) - SEQ - 1, 8)
        rows = np.stack([text[start : start + SEQ + 1] for start in starts])
        losses.append(trainer.train_step(rows[:, :-1], rows[:, 1:]))
        if step % 20 == 0 or step == options.steps - 1:
            load = " ".join(f"{share:.2f}" for share in model.blocks[0].moe.expert_load())
            print(f"step {step:4}  loss {losses[-1]:.3f}  norm {trainer.grad_norm:.2f}  load of layer 0: {load}")

    prompt = list(b"the iron ")
    print(bytes(model.generate(prompt, 60)).decode())
    print(bytes(model.generate_top_p(prompt, 60, top_p=0.9, temperature=0.8, seed=3)).decode(errors="replace"))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
