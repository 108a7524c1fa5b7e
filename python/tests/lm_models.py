"""Small random models with a tokenizer, as transformers saves them, for tests of scores and of text that is written."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT = 48
WORDS = "the a sun moon sea boat cat bird house tree runs sings sleeps falls over under with without red blue".split()


def sentence(seed: int, count: int) -> str:
    """Words, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def write_tokenizer(folder: Path, bos: str | None) -> int:
    """Byte-level BPE. With `bos`, every text begins with that token, as Llama's. Gives the number of tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"] + ([bos] if bos else [])
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([sentence(seed, 40) + "\n" for seed in range(30)], trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|endoftext|>", bos_token=bos or "<|endoftext|>"
    )
    fast.save_pretrained(folder)
    return made.get_vocab_size()


def write_model(folder: Path, kind: str) -> transformers.PreTrainedModel:
    """A GPT-2, a Llama, a Qwen 3 with a tied head, or a mixture of experts. Weights are large, so that the most likely
    token is clear and changes from place to place."""
    vocab = write_tokenizer(folder, "<s>" if kind == "llama" else None)
    torch.manual_seed(11)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.25}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=32, vocab_size=vocab, n_positions=CONTEXT, **tokens
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(
            hidden_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
            intermediate_size=22, vocab_size=vocab, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            **tokens,
        )  # fmt: skip
        model = transformers.Qwen3ForCausalLM(config)
    elif kind in ("mixtral", "qwen3_moe"):
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
                 "head_dim": 4, "vocab_size": vocab, "max_position_embeddings": CONTEXT, **tokens}  # fmt: skip
        if kind == "mixtral":
            mixtral = {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
            config = transformers.MixtralConfig(**sizes, **mixtral, sliding_window=None, router_aux_loss_coef=0.0)
            model = transformers.MixtralForCausalLM(config)
        else:
            config = transformers.Qwen3MoeConfig(
                **sizes, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
                decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.0,
            )  # fmt: skip
            model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=4,
            intermediate_size=20, vocab_size=vocab, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
            **tokens,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.eval()


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
metadata:
  version: 1
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
WRITING = """\
output_type: generate_until
doc_to_text: "so {{question}}"
doc_to_target: "{{text}}"
generation_kwargs:
  until: ["\\n", "moon"]
  max_gen_toks: 14
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path) -> list[str]:
    """Three tasks of the harness over a file, one of each kind of request; gives their names."""
    lines = []
    for seed in range(18):
        # some texts are longer than the context; one question is empty
        question = sentence(seed, 2 + 5 * (seed % 6)) if seed else ""
        choices = [sentence(100 + 4 * seed + i, 1 + i) for i in range(4)]
        text = sentence(seed, 3 + 9 * (seed % 8))
        lines.append({"question": question, "choices": choices, "label": seed % 4, "text": text})
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, rest in (("choosing", CHOICES), ("rolling", ROLLING), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    return ["choosing", "rolling", "writing"]
