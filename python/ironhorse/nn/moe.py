"""The router and the experts it sends tokens to.

For each token x:
    probs = softmax(gate x)                       over all experts, in f32
    experts = the K largest logits                of equal ones the lower number first
    weights = probs of these, over their sum
    out = Σ_j weights_j · expert_j(x)             added in the order of j; no token is dropped
    aux = alpha · E · Σ_e f_e · P_e               f_e: share of tokens sent to e, P_e: mean of probs of e
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import _native, ops
from ..errors import InvalidValueError
from .checks import check_real
from .config import Config
from .layers import F32, I32, INIT_STD, Layer, Linear, SwiGLU, check_device, check_sizes, floats, kept_floats
from .stacked import Stacked
from .tensor import Seed, Tensor, generator, normal


class Routing(NamedTuple):
    """What a router decided. Route token·K + j is one choice; sorted by expert, routes are rows."""

    x: F32  # (tokens, hidden_dim)
    probs: F32  # (tokens, E)
    weights: F32  # (tokens, K)
    experts: I32  # (tokens, K)
    order: I32  # (tokens · K): the route of a row
    places: I32  # (tokens, K): the row of a route
    offsets: I32  # (E + 1): where the rows of each expert begin

    def load(self) -> F32:
        """(E): the share of the tokens sent to each expert; they sum to K."""
        load: F32 = np.diff(self.offsets).astype(np.float32) / np.float32(max(len(self.x), 1))
        return load


class Router(Layer):
    """Which experts a token goes to, and with which weights."""

    def __init__(self, hidden_dim: int, n_experts: int, top_k: int, *, seed: Seed = None, device: str = "auto") -> None:
        check_sizes("Router", hidden_dim=hidden_dim, n_experts=n_experts, top_k=top_k)
        if top_k > n_experts:
            raise InvalidValueError(f"Router: top_k is {top_k}, expected 1 to {n_experts}, the number of experts")
        self.hidden_dim, self.n_experts, self.top_k = hidden_dim, n_experts, top_k
        self.device = check_device(device, "Router")
        self.gate = Linear(hidden_dim, n_experts, seed=seed, device=device)
        self._last: Routing | None = None
        self._shape: tuple[int, ...] = ()

    def forward(self, x: Any) -> tuple[F32, list[list[int]]]:
        """(..., hidden_dim) -> weights (tokens, top_k), and for each token its top_k experts, the likeliest first."""
        x = kept_floats(x, "Router", "x", self.hidden_dim)
        routing = self._fwd(x.reshape(-1, self.hidden_dim))
        self._shape = x.shape
        return routing.weights.copy(), routing.experts.tolist()

    def _fwd(self, x: F32) -> Routing:
        """x (tokens, hidden_dim)."""
        self._shape = x.shape
        self._last = routing = Routing(x, *_native.nn_route(self.gate._fwd(x), self.top_k))
        return routing

    def backward(self, grad_output: Any, aux_loss_alpha: float = 0.0) -> Tensor:
        """The gradient of x, of the gradient of the weights (tokens, top_k).

        With `aux_loss_alpha`, the gradient of `compute_aux_loss(aux_loss_alpha)` is added. A `grad_output` of the shape
        of x is taken as the gradient of x from other uses of it: the weights then have none, and the router's is added.
        """
        routing = self._kept(self._last)
        grad = floats(grad_output, "Router.backward", "grad_output")
        if grad.shape == routing.weights.shape:
            return Tensor._wrap(self._bwd(grad, aux_loss_alpha).reshape(self._shape))
        if grad.shape == self._shape:
            d_x = grad.reshape(routing.x.shape).copy()
            return Tensor._wrap(self._bwd(np.zeros_like(routing.weights), aux_loss_alpha, d_x).reshape(self._shape))
        expected = f"{list(routing.weights.shape)}, as the weights, or {list(self._shape)}, as the input"
        raise InvalidValueError(f"Router.backward: `grad_output` is {list(grad.shape)}, expected {expected}")

    def _bwd(self, d_weights: F32, alpha: float, add_to: F32 | None = None) -> F32:
        r = self._kept(self._last)
        check_real("Router.backward", "aux_loss_alpha", alpha)
        scale = alpha * self.n_experts / max(len(r.x), 1)
        d_logits = _native.nn_route_bwd(d_weights, r.probs, r.weights, r.experts, r.load(), scale)
        return self.gate._bwd(d_logits, add_to)

    def parameters(self) -> list[Tensor]:
        """The gate (n_experts, hidden_dim)."""
        return self.gate.parameters()

    def compute_aux_loss(self, alpha: float = 0.01) -> float:
        """The load-balancing loss of the last forward; 0 before there was one."""
        if self._last is None:
            return 0.0
        check_real("aux_loss", "alpha", alpha)
        aux, _, _ = ops.aux_loss_forward(self._last.probs, self._last.experts, alpha=alpha, device=self.device)
        return float(aux)


class MoELayer(Layer):
    """Router, experts and the weighted sum: (..., hidden_dim) -> (..., hidden_dim).

    The weights of all experts lie in one array for gate, up and down each, so that their products are one call; those
    of `experts[e]` are views of them. A weight, layer or expert that was replaced is copied there before its next
    use.
    """

    def __init__(self, config: Config, *, seed: Seed = None, device: str = "auto") -> None:
        Config.sizes_of(config, "MoELayer")
        self.device = check_device(device, "MoELayer")
        rng, C, F, E = generator(seed), config.hidden_dim, config.ffn_dim, config.n_experts
        self.config, self.hidden_dim, self.ffn_dim = config, C, F
        self.n_experts, self.top_k = E, config.top_k_experts
        self.router = Router(C, E, config.top_k_experts, seed=rng, device=device)
        stacks = [normal(shape, INIT_STD, rng) for shape in ((E, F, C), (E, F, C), (E, C, F))]
        gate, up, down = stacks
        self.experts = [SwiGLU._view(gate[e], up[e], down[e], device) for e in range(E)]
        self._stacked = Stacked(stacks, self.experts)
        self._last: tuple[Routing, F32, F32, F32, F32, F32] | None = None  # rows, gate, up, their product, down

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle. A copied view is not a view of the copied stack, so stacks are made anew."""
        return {name: value for name, value in vars(self).items() if name != "_stacked"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        E, F, C = self.n_experts, self.ffn_dim, self.hidden_dim
        self._stacked = Stacked([np.empty(shape, np.float32) for shape in ((E, F, C), (E, F, C), (E, C, F))])
        self._stacked.weights(self.experts)

    def forward(self, x: Any) -> Tensor:
        """(..., hidden_dim) -> (..., hidden_dim)."""
        return Tensor._wrap(self._fwd(kept_floats(x, "MoELayer", "x", self.hidden_dim)))

    def _fwd(self, x: F32) -> F32:
        routing, device = self.router._fwd(x.reshape(-1, self.hidden_dim)), self.device
        w_gate, w_up, w_down = self._stacked.weights(self.experts)
        offsets = routing.offsets
        rows = _native.nn_permute(routing.x, routing.order)
        gate = _native.nn_grouped(rows, w_gate, offsets, device)
        up = _native.nn_grouped(rows, w_up, offsets, device)
        inner = ops.swiglu(gate, up, device=device)
        made = _native.nn_grouped(inner, w_down, offsets, device)
        self._last = routing, rows, gate, up, inner, made
        return _native.nn_combine(made, routing.places, routing.weights).reshape(x.shape)

    def backward(self, grad_output: Any, aux_loss_alpha: float = 0.0) -> Tensor:
        """The gradient of x. With `aux_loss_alpha`, that of `aux_loss(aux_loss_alpha)` is in it and in the router's."""
        grad = floats(grad_output, "MoELayer.backward", "grad_output", self.hidden_dim)
        return Tensor._wrap(self._bwd(grad, aux_loss_alpha))

    def _bwd(self, grad: F32, alpha: float) -> F32:
        routing, rows, gate, up, inner, made = self._kept(self._last)
        if grad.size != routing.x.size:
            expected = [len(routing.x), self.hidden_dim]
            raise InvalidValueError(f"MoELayer.backward: `grad_output` is {list(grad.shape)}, expected {expected}")
        w_gate, w_up, w_down = self._stacked.weights(self.experts)
        g_gate, g_up, g_down = self._stacked.grads()
        offsets, device = routing.offsets, self.device
        flat = grad.reshape(-1, self.hidden_dim)
        d_made, d_weights = _native.nn_combine_bwd(flat, made, routing.places, routing.weights)
        _native.nn_grouped_weight(d_made, inner, g_down, offsets, device)
        d_inner = _native.nn_grouped_input(d_made, w_down, offsets, device)
        d_gate, d_up = _native.nn_swiglu_bwd(d_inner, gate, up, device=device)
        _native.nn_grouped_weight(d_gate, rows, g_gate, offsets, device)
        _native.nn_grouped_weight(d_up, rows, g_up, offsets, device)
        d_rows = _native.nn_grouped_input(d_gate, w_gate, offsets, device)
        ops.add(d_rows, _native.nn_grouped_input(d_up, w_up, offsets, device), d_rows, device=device)
        d_x = _native.nn_permute_bwd(d_rows, routing.places)
        return self.router._bwd(d_weights, alpha, d_x).reshape(grad.shape)

    def parameters(self) -> list[Tensor]:
        """The gate of the router, then gate, up and down of each expert."""
        return self.router.parameters() + [p for expert in self.experts for p in expert.parameters()]

    def aux_loss(self, alpha: float = 0.01) -> float:
        """The load-balancing loss of the last forward."""
        return self.router.compute_aux_loss(alpha)

    def expert_load(self) -> F32:
        """(n_experts): the share of the tokens of the last forward sent to each expert; they sum to top_k."""
        last: Routing = self.router._kept(self.router._last)
        return last.load()
