"""The mixture of experts once more, in numpy f64 and loops over tokens, heads and experts: slow, and written from the
equations alone, so that it shares no mistake with ironhorse.reference.moe."""

from __future__ import annotations

import math

import numpy as np
from ironhorse.config import MoEConfig


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotate(head: np.ndarray, position: int, c: MoEConfig) -> np.ndarray:
    out = head.copy()
    half = c.head_dim // 2
    for i in range(half):
        theta = c.rope_base * c.rope_alpha ** (c.head_dim / (c.head_dim - 2))
        angle = position * theta ** (-2 * i / c.head_dim)
        z = complex(head[i], head[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = z.real, z.imag
    return out


def attention(rows: np.ndarray, p: dict[str, np.ndarray], c: MoEConfig) -> np.ndarray:
    """One sequence, (T, C) normalised -> (T, C)."""
    T, HD, group = len(rows), c.head_dim, c.n_head // c.n_kv_head
    q, k, v = (rows @ p[f"self_attn.{part}_proj.weight"].T for part in "qkv")
    mixed = np.zeros((T, c.n_head * HD))
    for t in range(T):
        for h in range(c.n_head):
            at, kv = slice(h * HD, (h + 1) * HD), slice(h // group * HD, (h // group + 1) * HD)
            query = rotate(q[t, at], t, c)
            scores = [query @ rotate(k[s, kv], s, c) / math.sqrt(HD) for s in range(t + 1)]
            total = sum(math.exp(score) for score in scores)
            for s, score in enumerate(scores):
                mixed[t, at] += math.exp(score) / total * v[s, kv]
    return mixed @ p["self_attn.o_proj.weight"].T


def ranked(logits: np.ndarray, k: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:k]


def moe(row: np.ndarray, p: dict[str, np.ndarray], c: MoEConfig, chosen: list[int] | None):
    """One token: output, choice and all probabilities."""
    logits = p["block_sparse_moe.gate.weight"] @ row
    probs = np.array([math.exp(logit) for logit in logits])
    probs /= probs.sum()
    chosen = ranked(logits, c.top_k) if chosen is None else chosen
    total = sum(probs[e] for e in chosen)
    out = np.zeros(c.hidden)
    for e in chosen:
        w1, w2, w3 = (p[f"block_sparse_moe.experts.{e}.w{i}.weight"] for i in (1, 2, 3))
        out += probs[e] / total * (w2 @ (silu(w1 @ row) * (w3 @ row)))
    return out, chosen, probs


def run(params: dict[str, np.ndarray], c: MoEConfig, x: np.ndarray, y: np.ndarray, fixed: list | None = None) -> dict:
    """Loss, aux per layer, logits (B·T, V) and choices [layer][token]; `fixed` choices are kept whatever the logits."""
    streams = [params["model.embed_tokens.weight"][row].copy() for row in x]
    aux, choices = [], []
    for layer in range(c.n_layer):
        start = f"model.layers.{layer}."
        p = {name.removeprefix(start): value for name, value in params.items() if name.startswith(start)}
        chosen, all_probs = [], []
        for stream in streams:
            normed = np.array([rms(row, p["input_layernorm.weight"], c.rms_eps) for row in stream])
            stream += attention(normed, p, c)
            for t, row in enumerate(stream):
                h = rms(row, p["post_attention_layernorm.weight"], c.rms_eps)
                if c.n_experts:
                    out, picks, probs = moe(h, p, c, fixed[layer][len(chosen)] if fixed else None)
                    chosen.append(picks)
                    all_probs.append(probs)
                else:
                    gate, up, down = (p[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
                    out = down @ (silu(gate @ h) * (up @ h))
                stream[t] = row + out
        choices.append(chosen)
        if c.n_experts:
            N = len(chosen)
            share = [sum(e in picks for picks in chosen) / N for e in range(c.n_experts)]
            mean = [sum(probs[e] for probs in all_probs) / N for e in range(c.n_experts)]
            aux.append(c.aux_alpha * c.n_experts * sum(f * P for f, P in zip(share, mean, strict=True)))
    rows = [rms(row, params["model.norm.weight"], c.rms_eps) for stream in streams for row in stream]
    logits = np.array(rows) @ params["lm_head.weight"].T
    targets = [int(target) for row in y for target in row]
    entropy = [math.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, targets, strict=True)]
    return {"loss": sum(entropy) / len(entropy) + sum(aux), "aux": aux, "logits": logits, "choices": choices}
