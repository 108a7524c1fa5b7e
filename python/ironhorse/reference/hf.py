"""GPT-2 weights in Hugging Face's layout: the same names under `transformer.`, four matrices transposed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .. import _native
from ..config import GPT2Config, from_hf_dict
from ..errors import FormatError, IronhorseError
from ..formats.folders import read_f32
from ..formats.hf import TRANSPOSED
from ..params import param_shapes
from .gpt2 import GPT2
from .init import filled


def from_hf_state(state: Mapping[str, Tensor], config: GPT2Config, where: str) -> dict[str, Tensor]:
    """A Hugging Face state dict, with or without the `transformer.` prefix, as our parameters in f32."""
    found = {name.removeprefix("transformer."): value for name, value in state.items()}
    params: dict[str, Tensor] = {}
    for name, shape in param_shapes(config).items():
        if name not in found:
            raise IronhorseError(f"{where}: no tensor {name}; is this a GPT-2?")
        value = found[name].float()
        params[name] = (value.t() if name.endswith(TRANSPOSED) else value).contiguous()
        if tuple(params[name].shape) != shape:
            raise IronhorseError(f"{where}: {name} is {list(params[name].shape)}, expected {list(shape)}")
    return params


def to_hf_state(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters as `transformers.GPT2LMHeadModel` names and lays them out."""
    state = {
        f"transformer.{name}": (value.t() if name.endswith(TRANSPOSED) else value).contiguous()
        for name, value in params.items()
    }
    return state | {"lm_head.weight": params["wte.weight"]}


def load_hf(source: str) -> GPT2:
    """A GPT-2 from a run or a checkpoint, or by `transformers` (imported only here) from a folder or from the hub."""
    folder = Path(source)
    if folder.is_dir() and _native.file_kind(folder) != "hf":
        return _load_checkpoint(folder)
    try:
        import transformers
    except ImportError:
        raise IronhorseError(
            f"{source}: loading Hugging Face weights needs transformers; pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(source)
        config = from_hf_dict(hf_config.to_dict(), source)
        if not isinstance(config, GPT2Config):
            raise FormatError(f"{source}: a {config.kind}, expected a GPT-2; export it with `ironhorse.export moe`")
        model = transformers.GPT2LMHeadModel.from_pretrained(source)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise IronhorseError(f"{source}: transformers cannot load it ({reason})") from None
    ours = GPT2(config)
    ours.load_state_dict(from_hf_state(model.state_dict(), config, source))
    return ours


def _load_checkpoint(folder: Path) -> GPT2:
    """transformers would take the weights, and not the masters that they were rounded from."""
    config, params = read_f32(folder)
    if not isinstance(config, GPT2Config):
        raise FormatError(f"{folder}: a {config.kind}, expected a GPT-2; export it with `ironhorse.export moe`")
    return filled(GPT2(config), params)
