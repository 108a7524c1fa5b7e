"""The answers of a decoder of Llama's design by Hugging Face's own model of its family, instead of our reference.

The model is loaded by `transformers` from a folder as we write it; forward, backward and the load-balancing loss of a
layer are its code. What it does not show, the probabilities and what RoPE has turned, is not in such a key. Its
auxiliary loss takes all layers as one; ours is of each layer, so its function is called for each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import MoEConfig
from ..errors import NotAvailableError
from ..formats.header import Array
from ..formats.hf import write_hf
from .moe import MoE
from .train import AdamW, Answers, Recorder, run_steps

NORM_2 = ("post_attention_layernorm", "pre_feedforward_layernorm")  # before the MLP: of others, of Gemma 3


def compute_by_transformers(
    model: MoE, x: Tensor, y: Tensor, optimizer: AdamW, steps: int, with_acts: bool = True
) -> Answers:
    """As `train.compute_answers`, but `model` (f32) only gives its weights, and stays as it is."""
    theirs, config = load(model), model.config
    recorder = Recorder()
    hooks = list(_watch(theirs, config, recorder)) if with_acts else []
    logits, loss, aux = _loss(theirs, config, x, y)
    loss.backward()
    for hook in hooks:
        hook.remove()
    scale = config.query_scale  # their queries are scaled with the scores
    acts, dacts = _joined(recorder.acts(), config, scale), _joined(recorder.dacts(), config, 1 / scale)
    out = {f"act.{name}": value for name, value in acts.items()} | {"logits": logits.detach(), "loss": loss.detach()}
    out |= {"aux": aux.detach()} if aux.numel() else {}
    out |= {f"dact.{name}": value for name, value in dacts.items()}
    out |= {f"grad.{name}": grad.clone() for name, grad in _by_our_names(theirs, config, grads=True).items()}
    if steps:
        out["losses"] = run_steps(optimizer.build(theirs), lambda: _loss(theirs, config, x, y)[1], steps, loss)
        out |= {f"after.{name}": value.detach() for name, value in _by_our_names(theirs, config, grads=False).items()}
    return Answers(out, list(acts))


def load(model: MoE) -> nn.Module:
    """`transformers`' model with these weights, in plain PyTorch operations."""
    try:
        import transformers
    except ImportError:
        raise NotAvailableError("--reference transformers needs it; pip install transformers") from None
    params = {name: param.detach().numpy() for name, param in model.named_parameters()}
    # its progress bar is not ours to show; there is no other way to load without
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = _from_folder(transformers, model.config, params)
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
    if model.config.n_experts:
        experts = getattr(theirs.model.layers[0].mlp, "experts", None)
        if not hasattr(experts, "gate_up_proj"):  # before version 5 experts were modules of their own
            raise NotAvailableError(
                f"--reference transformers: {transformers.__version__} is too old; pip install 'transformers>=5'"
            )
        theirs.set_experts_implementation("eager")  # the default asks for widths that are multiples of 16 bytes
    eager: nn.Module = theirs.eval()
    return eager


def _from_folder(transformers: Any, config: MoEConfig, params: dict[str, Array]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_hf(Path(folder), config, params, dict.fromkeys(params, "F32"), None)
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(folder, attn_implementation="eager", dtype=torch.float32)


def _loss(theirs: Any, config: MoEConfig, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits, the loss with the auxiliary losses in it, and these."""
    if not config.n_experts:
        logits = theirs(x, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits.new_zeros(0)
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found = theirs(x, use_cache=False, output_router_logits=True)
    balance = (load_balancing_loss_func((one,), config.n_experts, config.top_k) for one in found.router_logits)
    aux = config.aux_alpha * torch.stack([torch.as_tensor(one) for one in balance])  # its type says it may be 0
    loss = F.cross_entropy(found.logits.flatten(0, 1), y.flatten()) + aux.sum()
    return found.logits, loss, aux


def _by_our_names(theirs: nn.Module, config: MoEConfig, grads: bool) -> dict[str, Tensor]:
    """Parameters or their gradients; the experts of a layer, two tensors there, one by one."""
    block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    if config.family == "qwen3":
        block, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    out: dict[str, Tensor] = {}
    for name, param in theirs.named_parameters():
        value = param.grad if grads else param
        assert value is not None, name
        start, inside, what = name.partition(".mlp.experts.")
        if not inside:
            out[name.replace(".mlp.gate.weight", f".{block}.gate.weight")] = value
            continue
        for expert in range(config.n_experts):
            stem = f"{start}.{block}.experts.{expert}"
            if what == "down_proj":
                out[f"{stem}.{down}.weight"] = value[expert]
            else:
                out[f"{stem}.{gate}.weight"], out[f"{stem}.{up}.weight"] = value[expert].chunk(2)
    return out


def _watch(theirs: Any, config: MoEConfig, record: Recorder) -> Iterator[Any]:
    """Shows the recorder what flows between the modules, under our names; q, k and v one by one."""

    def after(module: nn.Module, *names: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            values = output if isinstance(output, tuple) else (output,)
            for name, value in zip(names, values, strict=True):
                record(name, value if value.is_floating_point() else value.int())

        return module.register_forward_hook(hook)

    def before(module: nn.Module, name: str) -> Any:
        return module.register_forward_pre_hook(lambda _module, inputs: record(name, inputs[0]))

    body = theirs.model
    yield after(body.embed_tokens, "embed")
    for number, layer in enumerate(body.layers):
        name = f"layers.{number}"
        yield after(layer.input_layernorm, f"{name}.input_layernorm")
        for part in "qkv":
            yield after(getattr(layer.self_attn, f"{part}_proj"), f"{name}.qkv/{part}")
        for part in "qk" if config.has_qk_norm else "":
            yield after(getattr(layer.self_attn, f"{part}_norm"), f"{name}.qk_norm/{part}")
        yield before(layer.self_attn.o_proj, f"{name}.attn")
        yield after(layer.self_attn.o_proj, f"{name}.o_proj")
        yield before(getattr(layer, NORM_2[config.is_gemma3]), f"{name}.residual_1")
        yield after(layer.post_attention_layernorm, f"{name}.post_attention_layernorm")
        for part in ("pre_feedforward_layernorm", "post_feedforward_layernorm") if config.is_gemma3 else ():
            yield after(getattr(layer, part), f"{name}.{part}")
        if config.n_experts:
            yield after(layer.mlp.gate, *(f"{name}.{what}" for what in ("router_logits", "weights", "experts")))
            yield after(layer.mlp, f"{name}.moe")
        else:
            yield before(layer.mlp.down_proj, f"{name}.mlp_act")
            yield after(layer.mlp, f"{name}.mlp")
        yield after(layer, f"{name}.residual_2")
    yield after(body.norm, "norm")


def _joined(kept: dict[str, Tensor], config: MoEConfig, q_scale: float) -> dict[str, Tensor]:
    """q, k and v of a layer side by side, in the place of q; their norms are of (B, T, heads, HD), and v has none.

    Gemma 3 has norms of (B, heads, T, HD). Queries after their norm are multiplied by `q_scale`.
    """
    out: dict[str, Tensor] = {}
    for name, value in kept.items():
        stem, part = name.partition("/")[::2]
        if part == "q":
            v = kept[f"{stem.replace('.qk_norm', '.qkv')}/v"]
            q, k = value, kept[f"{stem}/k"]
            if stem.endswith(".qk_norm"):
                q, k = (part.transpose(1, 2) if config.is_gemma3 else part for part in (q * q_scale, k))
            out[stem] = torch.cat((q.flatten(2), k.flatten(2), v), dim=-1)
        elif not part:
            out[name] = value
    return out
