"""The sizes of a model, under the names of this module."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MoEConfig
from ..errors import ConfigError, InvalidValueError
from ..params import active_params, total_params


@dataclass
class Config:
    """Sizes and constants. Nothing is allocated until a layer or model is made of them."""

    hidden_dim: int = 768
    n_layers: int = 30
    n_heads: int = 12
    n_kv_heads: int = 1  # a divisor of n_heads
    n_experts: int = 16
    top_k_experts: int = 4  # experts of a token
    vocab_size: int = 32000
    max_seq_len: int = 32768
    ffn_dim: int = 6144  # width inside an expert
    head_dim: int = 64  # even; n_heads * head_dim need not be hidden_dim
    rope_base: float = 10000.0
    rope_alpha: float = 8.0  # NTK: stretches the wavelengths for longer contexts; 1 changes nothing
    rms_eps: float = 1e-5

    @classmethod
    def default_6_9b(cls) -> Config:
        """6.9 billion parameters, 1.8 of them active."""
        return cls()

    @classmethod
    def tiny(cls) -> Config:
        """Small enough for tests."""
        return cls(64, 2, 4, 1, 4, 2, 1000, 512, 256, 16, rope_alpha=1.0)

    @classmethod
    def from_sizes(cls, sizes: MoEConfig) -> Config:
        """Of the sizes as the rest of ironhorse has them. Raises InvalidValueError for what is not in this module."""
        if sizes.kind not in ("moe", "llama") or sizes.tied or sizes.rope_type != "default":
            own = "a tied head" if sizes.tied else f"RoPE of type {sizes.rope_type}"
            found = f"a {sizes.kind}" if sizes.kind not in ("moe", "llama") else own
            raise InvalidValueError(f"Config: found {found}; this module has Mixtral's layers only")
        return cls(
            hidden_dim=sizes.hidden,
            n_layers=sizes.n_layer,
            n_heads=sizes.n_head,
            n_kv_heads=sizes.n_kv_head,
            n_experts=sizes.n_experts,
            top_k_experts=sizes.top_k,
            vocab_size=sizes.vocab_size,
            max_seq_len=sizes.max_seq_len,
            ffn_dim=sizes.ffn,
            head_dim=sizes.head_dim,
            rope_base=sizes.rope_base,
            rope_alpha=sizes.rope_alpha,
            rms_eps=sizes.rms_eps,
        )

    def sizes(self) -> MoEConfig:
        """As the rest of ironhorse has them. Raises InvalidValueError unless a model of these sizes can exist."""
        sizes = MoEConfig(
            hidden=self.hidden_dim,
            n_layer=self.n_layers,
            n_head=self.n_heads,
            n_kv_head=self.n_kv_heads,
            head_dim=self.head_dim,
            n_experts=self.n_experts,
            top_k=self.top_k_experts,
            ffn=self.ffn_dim,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            rope_base=self.rope_base,
            rope_alpha=self.rope_alpha,
            rms_eps=self.rms_eps,
        )
        try:
            sizes.validate()
        except ConfigError as error:
            raise InvalidValueError(f"Config: {error}") from None
        if not self.n_experts:
            raise InvalidValueError("Config: n_experts is 0; a model of this module has at least one expert")
        return sizes

    @staticmethod
    def sizes_of(config: Config, who: str) -> MoEConfig:
        """The same, of what may be no Config."""
        if not isinstance(config, Config):
            raise InvalidValueError(f"{who}: config is of type {type(config).__name__}, expected nn.Config")
        return config.sizes()

    def total_params(self) -> int:
        """All parameters."""
        return total_params(self.sizes())

    def active_params(self) -> int:
        """Parameters used for one token: all except the experts it is not sent to."""
        return active_params(self.sizes())
