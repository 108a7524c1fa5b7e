"""The class that lm-evaluation-harness calls: text to tokens and back, and everything else to Rust."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from .. import _native
from ..errors import InvalidValueError
from ..model._inputs import dtype_name
from ._beginning import beginning
from ._generation import parse

# Requests whose scores are asked for at once: enough to fill every batch, few enough to show progress.
_AT_ONCE = 1024

# (the texts for the cache, the tokens before, the tokens that count)
Request = tuple[Any, list[int], list[int]]


@register_model("ironhorse")
class IronhorseLM(TemplateLM):
    """A run, a checkpoint, a Hugging Face folder or a model .bin, with its weights loaded once.

    `pretrained` is its path, `tokenizer` a tokenizer if there is none beside it. `device` is auto, cpu, cuda or cuda:N;
    `dtype` f32, tf32 or bf16. `max_length` is how many tokens the model sees at once, at most its context.

    Requests are batched by their length, about `batch_tokens` tokens at a time. The harness's `batch_size` is that many
    texts of `max_length` tokens; its default of 1, and auto, leave the choice to the device.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        threads: int = 0,
    ) -> None:
        super().__init__()
        options = {
            "--tokenizer": tokenizer,
            "--device": device,
            "--dtype": dtype_name(dtype),
            "--seq": max_length,
            "--batch-tokens": batch_tokens,
            "--batch-texts": _texts_of(batch_size),
            "--threads": threads,
        }
        given = (f"{name}={value}" for name, value in options.items() if value is not None)
        self._model = _native.LanguageModel([f"--model={pretrained}", *given])
        self.pretrained, self.max_length = str(pretrained), self._model.context
        self.batch_size, self.max_gen_toks = batch_size, int(max_gen_toks)
        self._begin(tokenizer, add_bos_token, prefix_token_id)

    def _begin(self, tokenizer: str | None, add_bos_token: bool | None, prefix_token_id: int | None) -> None:
        """Finds out what stands before a text."""
        path = Path(tokenizer) if tokenizer and Path(tokenizer).exists() else self._model.path
        bos, always = beginning(path if path.is_dir() else path.parent)
        ids = self._model.encode(bos) if bos else []
        self._bos = (bos, ids[0]) if bos and len(ids) == 1 else None
        # by what a call asks for: nothing, special tokens, none
        self._adds_bos = {None: always if add_bos_token is None else bool(add_bos_token), True: always, False: False}
        self._prefix = prefix_token_id if prefix_token_id is not None else self._bos[1] if self._bos else None

    @property
    def eot_token_id(self) -> int:
        """The token between texts."""
        if self._model.eot is None:
            raise InvalidValueError(f"{self.pretrained}: has no token between texts; give tokenizer or prefix_token_id")
        return self._model.eot

    @property
    def prefix_token_id(self) -> int:
        """The token before a text of which every token counts."""
        return self._prefix if self._prefix is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """What tells this tokenizer from others, for the harness's cache of requests."""
        return self.pretrained.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """For the harness's report."""
        model = self._model
        return {"model_num_parameters": model.params, "model_dtype": model.dtype, "model_device": model.device}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """The tokens of a text, after the one that stands before every text if the tokenizer has such a token."""
        ids = self._model.encode(string)
        if self._bos is None or not self._adds_bos[add_special_tokens]:
            return ids
        begins_already = add_special_tokens is None and string.startswith(self._bos[0])
        return ids if begins_already else [self._bos[1], *ids]

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._model.decode(list(tokens))

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        texts = [(before + counted, len(before)) for _, before, counted in requests]
        for _, _, counted in requests:
            if len(counted) > self.max_length:
                raise InvalidValueError(f"a continuation has {len(counted)} tokens, the context only {self.max_length}")
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # the longest first: what does not fit into memory fails at once
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at][0]))
        with tqdm(total=len(texts), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for first in range(0, len(order), _AT_ONCE):
                now = order[first : first + _AT_ONCE]
                for at, (nats, _, greedy) in zip(now, self._model.score([texts[at] for at in now]), strict=True):
                    answers[at] = (nats, greedy)
                    if (key := requests[at][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answers[at])
                bar.update(len(now))
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows that do not overlap; the last one is full."""
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            mine = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += mine
            counts.append(len(mine))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        sums = []
        for request, count in zip(requests, counts, strict=True):
            sums.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts until a stop text, the end of the text or the most tokens, one after the other."""
        texts = []
        for at, request in enumerate(tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests")):
            context, given = request.args
            asked = parse(given, self.max_gen_toks)
            room = self.max_length - asked.tokens
            if room < 1:
                most = self.max_length - 1
                raise InvalidValueError(f"max_gen_toks is {asked.tokens}, expected at most {most}, below the context")
            prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
            # a task that repeats a request wants another sample each time
            text = self._model.write(
                prompt, asked.tokens, asked.until,
                temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed + at,
            )  # fmt: skip
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts


def _texts_of(batch_size: int | str | None) -> int | None:
    """The harness's batch size if it asks for one: a number, of which 1 is its default, `auto` or `auto:N`."""
    if batch_size is None or str(batch_size) == "1" or str(batch_size).startswith("auto"):
        return None
    if not str(batch_size).isdigit() or int(batch_size) < 1:
        raise InvalidValueError(f"batch_size is {batch_size!r}, expected a number of at least 1, or auto")
    return int(batch_size)
