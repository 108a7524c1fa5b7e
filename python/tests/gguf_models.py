"""Small models of every family that a GGUF file can hold, as transformers writes them, each with its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXT = (
    "The cat sat on the mat. The cat's hat isn't flat; we'll see 2024 or 31415 of them.\n\n"
    "  A line that is indented, and one é, ß, 日本 and 🙂 for the bytes.\n" * 4
)
# every width is a multiple of 32, for q8_0; no two sizes of one model are equal
SIZES = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
QWEN_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)

FAMILIES = {  # name: architecture in the file, its tokenizer's way of cutting, the configuration
    "gpt2": ("gpt2", "gpt-2", lambda **ids: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, **ids)),
    "llama-tied": ("llama", "pieces", lambda **ids: transformers.LlamaConfig(
        **SIZES, rope_parameters=ROPE, tie_word_embeddings=True, **ids)),
    "llama3": ("llama", "llama-bpe", lambda **ids: transformers.LlamaConfig(**SIZES, rope_parameters=SCALED, **ids)),
    "linear": ("llama", "gpt-2", lambda **ids: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR, **ids)),
    "mistral": ("llama", "pieces", lambda **ids: transformers.MistralConfig(
        **SIZES, rope_parameters=ROPE, sliding_window=None, **ids)),
    "mixtral": ("llama", "pieces", lambda **ids: transformers.MixtralConfig(
        **SIZES, rope_parameters=ROPE, sliding_window=None, num_local_experts=4, num_experts_per_tok=2, **ids)),
    "qwen2": ("qwen2", "qwen2", lambda **ids: transformers.Qwen2Config(
        **{**SIZES, "head_dim": 16}, rope_parameters=ROPE, tie_word_embeddings=True, **ids)),
    "qwen3": ("qwen3", "qwen2", lambda **ids: transformers.Qwen3Config(**SIZES, rope_parameters=ROPE, **ids)),
    "qwen3_moe": ("qwen3moe", "qwen2", lambda **ids: transformers.Qwen3MoeConfig(
        **SIZES, rope_parameters=ROPE, **QWEN_EXPERTS, **ids)),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A model and its folder."""

    folder: Path
    arch: str
    cut: str
    model: torch.nn.Module
    tokenizer: Tokenizer


def byte_level(cut: str) -> Tokenizer:
    """Byte-level BPE that cuts text like GPT-2, Llama 3 or Qwen 2."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    if cut == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        regex = Regex(LLAMA3 if cut == "llama-bpe" else QWEN2)
        split = pre_tokenizers.Split(regex, "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def pieces() -> Tokenizer:
    """BPE of characters with bytes for the others, as Llama 2 and Mistral have it."""
    trained = Tokenizer(models.BPE())
    metaspace = pre_tokenizers.Metaspace()
    trained.pre_tokenizer = metaspace
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=first, show_progress=False, limit_alphabet=40)
    trained.train_from_iterator([TEXT], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return tokenizer


def make(name: str, folder: Path, seed: int = 5) -> Made:
    """Random weights; rows of the token table beyond the tokenizer's ids, as real models have them."""
    arch, cut, config_of = FAMILIES[name]
    tokenizer = pieces() if cut == "pieces" else byte_level(cut)
    end = "</s>" if cut == "pieces" else "<|im_end|>"
    ids = dict(bos_token_id=tokenizer.token_to_id("<s>"), eos_token_id=tokenizer.token_to_id(end))
    config = config_of(vocab_size=tokenizer.get_vocab_size() + 5, **ids)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for param in model.parameters():  # what starts at 0 or 1 would hide a mistake
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.2)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": end, "chat_template": TEMPLATE}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Made(folder, arch, cut, model, tokenizer)
