"""Random weights and tokens of a mixture of experts: those of answer keys, with options for unusual routing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import IronhorseError
from ..params import active_params, decays
from .init import random_batch
from .moe import MoE

INITS = ("spread", "mixtral", "idle", "single", "tied")

# How far apart neighbours among the ranked logits are at least, as far as their order matters, in units of the noise a
# rounding error of 1 would cause. bf16 has an error of about 0.01 by the time a few layers have passed.
MARGIN = 0.05
BUDGET = 2e11  # arithmetic that the search for such tokens may take


@torch.no_grad()
def init_weights(model: MoE, seed: int, how: str = "mixtral") -> MoE:
    """Fills every parameter from `seed`, in parameter order.

    mixtral  as Hugging Face starts Mixtral and Llama: matrices N(0, 0.02), norms 1.
    spread   for answer keys: matrices N(0, 1/sqrt(in)), those that end in the residual stream less by sqrt(2L), norms
             random around 1, biases around 0: attention and routing far from uniform, no parameter that a bug may
             ignore.
    idle     spread, but no token ever chooses expert 1.
    single   spread, but every token chooses the last expert first; with K = 1 all others are idle.
    tied     spread, but every gate is 0: all logits are equal, and experts 0..K-1 are chosen by the rule for ties.
    """
    if how not in INITS:
        raise IronhorseError(f"unknown init '{how}'; choose {', '.join(INITS)}")
    config = model.config
    if how in ("idle", "single", "tied") and not config.n_experts:
        raise IronhorseError(f"init {how}: this model has no experts; choose spread or mixtral")
    if how == "idle" and config.top_k == config.n_experts:
        raise IronhorseError(f"init idle: every token goes to all {config.n_experts} experts; choose a smaller top_k")
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if name.endswith(".bias"):
            param.normal_(0.0, 0.0 if how == "mixtral" else 0.3, generator=generator)
        elif not decays(tuple(param.shape)):
            one = 0.0 if config.is_gemma3 else 1.0  # what a norm of 1 is
            if how == "mixtral":
                param.fill_(one)
            else:
                param.normal_(one, 0.05, generator=generator)
        else:
            param.normal_(0.0, _std(name, param, config.n_layer, how), generator=generator)
    if how in ("idle", "single"):
        _bias_router(model, expert=1 if how == "idle" else config.n_experts - 1, sign=-1.0 if how == "idle" else 1.0)
    if how == "tied":
        for gate in gates(model):
            gate.zero_()
    return model


def _std(name: str, param: Tensor, n_layer: int, how: str) -> float:
    if how == "mixtral":
        return 0.02
    std = 1 / math.sqrt(param.shape[1])
    residual = name.endswith(("o_proj.weight", "w2.weight", "down_proj.weight"))
    return std / math.sqrt(2 * n_layer) if residual else std


def gates(model: MoE) -> list[Tensor]:
    """Each layer's (E, C)."""
    return [param for name, param in model.named_parameters() if name.endswith(".gate.weight")]


def _bias_router(model: MoE, expert: int, sign: float) -> None:
    """A router has no bias: channel 0 of the residual stream becomes large and positive for every token, and only the
    gate of `expert` looks at it."""
    model.model.embed_tokens.weight[:, 0] = 4.0  # more of it would drown the gradients of attention in rounding
    for gate in gates(model):
        gate[:, 0] = 0.0
        gate[expert, 0] = 2.0 * sign  # a logit of about 7: the others keep a gradient that can be measured


class RouterLog:
    """A recorder that keeps each layer's router input (N, C), logits (N, E) and choice (N, K)."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.experts: list[Tensor] = []

    def __call__(self, name: str, value: Tensor) -> None:
        if name.endswith(".post_attention_layernorm"):
            self.inputs.append(value.flatten(0, 1))
        elif name.endswith(".router_logits"):
            self.logits.append(value)
        elif name.endswith(".experts"):
            self.experts.append(value)


@torch.no_grad()
def margins(model: MoE, x: Tensor) -> Tensor:
    """(B, T): per token the least distance, over the layers, between neighbours among the K + 1 largest logits.

    The unit is √(Σ_i (gate_i · h_i)²), the larger of the two: how rounding errors of the products add up. Infinite
    where there is no choice, and for `tied` gates, whose logits are 0 without error.
    """
    log = RouterLog()
    model(x, log)
    least = torch.full(x.shape, math.inf)
    if model.config.n_experts < 2:
        return least
    for gate, inputs, logits in zip(gates(model), log.inputs, log.logits, strict=True):
        size = (inputs.square() @ gate.square().t()).sqrt()
        ranked, order = (part[:, : model.config.top_k + 1] for part in logits.sort(dim=-1, descending=True))
        size = size.gather(1, order)
        gap = (ranked[:, :-1] - ranked[:, 1:]) / torch.maximum(size[:, :-1], size[:, 1:])
        least = torch.minimum(least, gap.nan_to_num(math.inf).amin(dim=1).view_as(x))
    return least


def routed_batch(model: MoE, batch: int, seq: int, seed: int, margin: float = MARGIN) -> tuple[Tensor, Tensor, float]:
    """`clear_batch` of this model. In a large one the rounds are limited, and near ties remain."""
    cost = 2 * active_params(model.config) * batch * seq
    rounds = min(32 * seq, int(BUDGET / cost))
    return clear_batch(lambda x: margins(model, x), model.config.vocab_size, (batch, seq), seed, rounds, margin)


def clear_batch(
    margins: Callable[[Tensor], Tensor],
    vocab: int,
    shape: tuple[int, int],
    seed: int,
    rounds: int,
    margin: float = MARGIN,
) -> tuple[Tensor, Tensor, float]:
    """x, y (B, T) and the least margin: random tokens, of which those are drawn again whose choice of experts is a near
    tie, because there two correct programs may choose differently and then differ in everything.

    A token changes nothing before itself, so each round draws anew, in every sequence, from its first such token on,
    and asks a little less of that token.
    """
    batch, seq = shape
    x, y = random_batch(vocab, batch, seq, seed)
    stream = torch.cat((x.flatten(), y.flatten()[-1:]))
    x = stream[:-1].view(batch, seq)  # a view: what is drawn anew is in the stream
    generator = torch.Generator().manual_seed(seed ^ 0x726F757465)
    least, need = margins(x), torch.full(x.shape, margin)
    for _ in range(rounds):
        thin = least < need
        if not thin.any():
            break
        first = thin.int().argmax(dim=1)
        for row in thin.any(dim=1).nonzero().flatten().tolist():
            at = int(first[row])
            need[row, at] *= 0.9
            rest = x[row, at:]
            rest.copy_(torch.randint(vocab, rest.shape, generator=generator))
        least = margins(x)
    return x.clone(), stream[1:].view(batch, seq).clone(), float(least.min())


def check_routing(model: MoE, x: Tensor, how: str) -> None:
    """Raises IronhorseError unless the tokens are routed as the init promises."""
    if how not in ("idle", "single", "tied"):
        return
    log = RouterLog()
    with torch.no_grad():
        model(x, log)
    E, K = model.config.n_experts, model.config.top_k
    for layer, experts in enumerate(log.experts):
        kept = {
            "idle": not (experts == 1).any(),
            "single": bool((experts[:, 0] == E - 1).all()),
            "tied": bool((experts == torch.arange(K)).all()),
        }[how]
        if not kept:
            raise IronhorseError(f"init {how}: layer {layer} does not route so with this seed; choose another --seed")
