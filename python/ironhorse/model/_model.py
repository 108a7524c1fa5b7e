"""The class `ironhorse.Model`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..bridge.load import Loaded, PathLike, load
from ..bridge.tensors import Bf16, Framework, Maker
from ..config import ModelConfig, made
from ..errors import InvalidValueError, IronhorseError
from ._inputs import Messages, Tokens, are_messages, data_paths, dtype_name, messages_json, one_row, tokens
from ._settings import Setting, settings_json
from ._training import Callback, TrainReport, Watcher

Data: TypeAlias = PathLike | Sequence[PathLike] | None
Result = TypeVar("Result")

# Flags that are not arguments of `train`: where an error names them, the command is meant.
_OF_THE_COMMAND = ("config", "help", "init", "json", "model", "resume")


class Model:
    """A model with its weights on a device: `Model.from_pretrained("gpt2")` or of a folder, a run, a checkpoint.

    Calls may come from several threads; one is computed at a time, without the GIL. Ctrl-C ends a long call. `close`,
    the end of a `with` block, or dropping the last reference gives the memory back.
    """

    def __init__(self, native: _native.OpenModel) -> None:
        """Use `from_pretrained`."""
        self._native, self._closed = native, False
        self._look()

    def _look(self) -> None:
        """What is known of the weights, now that they have changed."""
        self._path, self._device, self._dtype, described = self._native.facts()
        self._config = made(*described, any_padding=True)
        base, self._adapted = self._native.adapted() or (None, [])
        # mapped, not read; the files stay even if their folder is removed
        self._loaded: Loaded = load(base or self._path, check=False)
        if base is None:
            self._path = self._loaded.path

    @classmethod
    def from_pretrained(
        cls,
        name: PathLike,
        *,
        device: str = "auto",
        dtype: object = None,
        tokenizer: PathLike | None = None,
        threads: int = 0,
    ) -> Model:
        """Loads a Hugging Face folder, a run (`RUN/best` is its best checkpoint), a checkpoint, a model .bin, or a
        model by name, such as `gpt2` or `Qwen/Qwen3-0.6B`, which is fetched once (see `ironhorse fetch`).

        `device` is auto, cpu, cuda or cuda:N; `dtype` f32, tf32 or bf16, also as torch's types [default: bf16 on a
        GPU, f32 on the CPU]; `tokenizer` a name, file or folder where there is none beside the weights.
        """
        if not isinstance(name, (str, os.PathLike)):
            found = type(name).__name__
            raise InvalidValueError(f"from_pretrained: name is of type {found}, expected a path or a name")
        given: dict[str, object] = {
            "model": os.fspath(name),
            "device": device,
            "dtype": dtype_name(dtype),
            "tokenizer": None if tokenizer is None else os.fspath(tokenizer),
            "threads": threads,
        }
        flags = [f"--{key}={value}" for key, value in given.items() if value is not None]
        return cls(_said("from_pretrained", lambda: _native.OpenModel(flags)))

    @property
    def config(self) -> ModelConfig:
        """The sizes: a `GPT2Config` or a `MoEConfig`."""
        return self._config

    @property
    def path(self) -> Path:
        """Where the weights are: a folder or file; after `train`, the run's last checkpoint."""
        return self._path

    @property
    def device(self) -> str:
        """cpu, cuda:0, ..."""
        return self._device

    @property
    def dtype(self) -> str:
        """f32, tf32 or bf16."""
        return self._dtype

    def __repr__(self) -> str:
        return f"<Model {self._config.kind}: {self.path}, {self._dtype} on {self._device}>"

    def encode(self, text: str) -> list[int]:
        """The token ids of a text; special tokens that are spelled out in it are tokens."""
        return _said("encode", lambda: self._native.encode(text))

    def decode(self, ids: Any) -> str:
        """The text that token ids stand for."""
        row = one_row("decode", "ids", ids, self._config.vocab_size)
        return _said("decode", lambda: self._native.decode(row))

    def logits(self, ids: Any) -> NDArray[np.float32]:
        """The logits after every token: [tokens, vocabulary] for one sequence, [rows, tokens, vocabulary] for several.

        `ids` are integers in lists, numpy arrays or torch tensors; `torch.from_numpy` of the result copies nothing.
        """
        given = tokens("logits", "ids", ids)
        flat = _said("logits", lambda: self._native.logits(np.atleast_2d(given)))
        return flat.reshape(*given.shape, self._config.vocab_size)

    def loss(self, ids: Any, labels: Any = None) -> float:
        """The mean loss in nats, as transformers computes it: token t + 1 of `labels` is predicted from the tokens of
        `ids` up to t, and labels of -100 do not count. Without `labels`, `ids` themselves are predicted. 0 if nothing
        counts.
        """
        given = np.atleast_2d(tokens("loss", "ids", ids))
        wanted = given if labels is None else np.atleast_2d(tokens("loss", "labels", labels))
        return _said("loss", lambda: self._native.loss(given, wanted))

    @overload
    def generate(self, prompt: str, **settings: Setting) -> str: ...
    @overload
    def generate(self, prompt: Sequence[int] | NDArray[Any], **settings: Setting) -> Tokens: ...
    @overload
    def generate(self, prompt: Messages, **settings: Setting) -> str: ...

    def generate(self, prompt: Any, **settings: Setting) -> str | Tokens:
        """Continues a text, which gives text, or token ids, which gives the new ids; until the token between texts.
        Messages (`[{"role": "user", "content": "..."}]`) are written by the chat template beside the tokenizer, and the
        answer is text, until the token that ends it.

        The settings are those of `ironhorse generate`: `tokens` (the most to add, 600), `greedy`, `temperature`,
        `top_k`, `top_p`, `seed`, `context`.
        """
        given, end = settings_json("generate", settings), None
        is_text = isinstance(prompt, str)
        if is_text:
            ids = _said("generate", lambda: self._native.prompt(prompt))
        elif are_messages(prompt):
            talk = messages_json("generate", prompt)
            ids, end = _said("generate", lambda: self._native.chat_prompt(talk))
            is_text = True
        else:
            ids = one_row("generate", "prompt", prompt, self._config.vocab_size)
        new = _said("generate", lambda: self._native.generate(ids, end, given))
        return self._native.decode(new) if is_text else np.array(new, np.int64)

    def train(
        self,
        data: Data = None,
        *,
        val_data: Data = None,
        out: PathLike | None = None,
        steps: int | None = None,
        batch: int | None = None,
        seq: int | None = None,
        lr: float | None = None,
        callback: Callback | None = None,
        progress: bool = True,
        **settings: Setting,
    ) -> TrainReport:
        """Trains from these weights, as `ironhorse train` does: with its settings and its files. The model then has
        the weights of the last step.

        `data` are token shards, text (.txt, .md, .jsonl, .parquet), a folder of `ironhorse prepare`, or data by name;
        `out` is the run folder [default: the next number below runs/]. Every flag of `ironhorse train` is a setting,
        with `_` for `-`: `accumulate=4`, `val_every=100`, `save_every=500`, `optimizer="muon"`.

        `callback` is called after every step with its line of metrics.jsonl: `step`, `loss`, `lr`, `grad_norm`,
        `tokens_per_s`, and `val_loss` where it was measured. If it returns False, the run is saved and stops; on a GPU
        after the step that is in flight. It cannot use the model. `progress` shows a bar. Ctrl-C saves, too, and
        raises KeyboardInterrupt; such a run is resumed by `ironhorse train --resume RUN`.
        """
        named: dict[str, Setting] = {
            "data": data_paths("train", "data", data), "val_data": data_paths("train", "val_data", val_data),
            "out": out, "steps": steps, "batch": batch, "seq": seq, "lr": lr,
        }  # fmt: skip
        return self._run("train", {**named, **settings}, Watcher(callback, progress))

    def tune(
        self,
        data: Data = None,
        *,
        val_data: Data = None,
        out: PathLike | None = None,
        epochs: float | None = None,
        lora: int | None = None,
        lr: float | None = None,
        callback: Callback | None = None,
        progress: bool = True,
        **settings: Setting,
    ) -> TrainReport:
        """Fine-tunes on chats, as `ironhorse tune` does: what is not given is chosen for the model, the chats and the
        memory. The model then has the weights of the last step, those of adapters included.

        `data` are lines of JSON as in docs/chat.md; `epochs` is how often every sample is seen; `lora` the rank of
        adapters that are trained in place of the weights. Other settings (`mask="completion"`, `seq=1024`, `batch=8`),
        `callback` and `progress` are those of `train`.
        """
        named: dict[str, Setting] = {
            "data": data_paths("tune", "data", data), "val_data": data_paths("tune", "val_data", val_data), "out": out,
            "epochs": epochs, "lora": lora, "lr": lr,
        }  # fmt: skip
        return self._run("tune", {**named, **settings}, Watcher(callback, progress))

    def _run(self, command: str, given: dict[str, Setting], watcher: Watcher) -> TrainReport:
        text = settings_json(command, given)
        try:
            report = _said(command, lambda: self._native.train(command, text, watcher))
        except BaseException:
            with suppress(IronhorseError):  # what is raised matters more
                self._look()  # a run that was interrupted has left its weights
            raise
        finally:
            watcher.close()
        self._look()
        return TrainReport.of(report)

    def save_pretrained(self, folder: PathLike, *, dtype: object = None, shard_size: int | str | None = None) -> Path:
        """Writes a Hugging Face folder that transformers loads as it is, with the tokenizer's files. Gives its path.

        `dtype` is f32 or bf16 [default: bf16 if all weights were stored so, else f32: nothing is lost]; `shard_size`
        the most bytes of one file, such as "2GB".
        """
        params = self._loaded.params
        as_stored = "bf16" if all(params.stored(name) == "BF16" for name in params) else "f32"
        given: dict[str, Setting] = {"dtype": dtype_name(dtype) or as_stored, "shard_size": shard_size}
        text, path = settings_json("save_pretrained", given), Path(folder)
        _said("save_pretrained", lambda: self._native.save(path, text))
        return path

    def state_dict(self, framework: Framework = "numpy", *, bf16: Bf16 = "float32") -> dict[str, Any]:
        """The weights by name, in the names and shapes of `ironhorse.load`, as numpy arrays or torch tensors.

        They are views of the mapped file that the model has its weights from, without a copy: all of them in torch, in
        numpy all but bf16, which numpy does not have; `bf16="bits"` gives views of it, too. Only the weights of runs
        with 16-bit master weights, and those with adapters in them, are put together in memory. numpy arrays are
        read-only; write to copies of torch tensors: the model does not see what is written to them.
        """
        if self._closed:
            raise InvalidValueError("state_dict: the model is closed; open it again with from_pretrained")
        found = self._loaded.params.remade(Maker(framework, bf16).check())
        for name in self._adapted:
            merged = self._native.weight(name).reshape(found.shape(name))
            found[name] = _torch_of(merged) if framework == "torch" else merged
        return {name: _read_only(found[name]) for name in found}

    def close(self) -> None:
        """Gives the memory back. Every later call raises an error."""
        self._native.close()
        self._closed = True

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _said(call: str, work: Callable[[], Result]) -> Result:
    """What `work` gives; errors name the call, and the arguments of Python instead of the flags of the command."""
    try:
        return work()
    except IronhorseError as error:
        text = re.sub(r"(?<![\w/-])--([a-z][\w-]*)", _argument, str(error).removesuffix(" (see --help)"))
        raise type(error)(text if text.startswith(f"{call}: ") else f"{call}: {text}") from None


def _argument(flag: re.Match[str]) -> str:
    return flag[0] if flag[1] in _OF_THE_COMMAND else flag[1].replace("-", "_")


def _torch_of(array: NDArray[np.float32]) -> Any:
    import torch

    return torch.from_numpy(array)


def _read_only(value: Any) -> Any:
    """A numpy array that cannot be written to: others may be views of the same memory."""
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view
