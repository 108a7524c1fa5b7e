"""The parameter table of a GPT-2: names, shapes, and where each tensor sits in a .bin file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .config import GPT2Config


@dataclass(frozen=True)
class BinTensor:
    """One tensor of a .bin file: `stem` is the parameter's name, per layer when `stacked`."""

    stem: str
    shape: tuple[int, ...]  # of one layer, as in the file (wte has Vp rows)
    stacked: bool

    def names(self, config: GPT2Config) -> list[str]:
        """The parameters that lie one after the other in this tensor."""
        return [f"h.{layer}.{self.stem}" for layer in range(config.n_layer)] if self.stacked else [self.stem]


def bin_order(config: GPT2Config) -> list[BinTensor]:
    """The sixteen tensors of a .bin file, in file order."""
    C = config.n_embd
    per_layer: list[tuple[str, tuple[int, ...]]] = [
        ("ln_1.weight", (C,)),
        ("ln_1.bias", (C,)),
        ("attn.c_attn.weight", (3 * C, C)),
        ("attn.c_attn.bias", (3 * C,)),
        ("attn.c_proj.weight", (C, C)),
        ("attn.c_proj.bias", (C,)),
        ("ln_2.weight", (C,)),
        ("ln_2.bias", (C,)),
        ("mlp.c_fc.weight", (4 * C, C)),
        ("mlp.c_fc.bias", (4 * C,)),
        ("mlp.c_proj.weight", (C, 4 * C)),
        ("mlp.c_proj.bias", (C,)),
    ]
    return [
        BinTensor("wte.weight", (config.padded_vocab_size, C), stacked=False),
        BinTensor("wpe.weight", (config.max_seq_len, C), stacked=False),
        *(BinTensor(stem, shape, stacked=True) for stem, shape in per_layer),
        BinTensor("ln_f.weight", (C,), stacked=False),
        BinTensor("ln_f.bias", (C,), stacked=False),
    ]


def param_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Every parameter by name, in model order, with its true shape: wte is (V, C), linear weights (out, in)."""
    tensors = bin_order(config)
    shapes: dict[str, tuple[int, ...]] = {t.stem: t.shape for t in tensors[:2]}
    shapes["wte.weight"] = (config.vocab_size, config.n_embd)
    for layer in range(config.n_layer):
        shapes |= {f"h.{layer}.{t.stem}": t.shape for t in tensors if t.stacked}
    return shapes | {t.stem: t.shape for t in tensors[-2:]}


def activation_names(n_layer: int) -> list[str]:
    """Every named activation, in execution order. `logits` and `loss` follow and have their own names."""
    per_layer = (
        "ln_1",
        "attn.c_attn",
        "attn.sdpa",
        "attn.c_proj",
        "residual_1",
        "ln_2",
        "mlp.c_fc",
        "mlp.gelu",
        "mlp.c_proj",
        "residual_2",
    )
    return ["embed", *(f"h.{layer}.{name}" for layer in range(n_layer) for name in per_layer), "ln_f"]
