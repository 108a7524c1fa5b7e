"""What ironhorse.nn refuses: each with the kind of error, and a text that says what is wrong and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from ironhorse import ops
from ironhorse.errors import Code, InvalidValueError, IronhorseError, NotAvailableError
from ironhorse.nn import (
    AdamW,
    Config,
    Embedding,
    GreedySampling,
    Linear,
    LRScheduler,
    MoELayer,
    MoETransformer,
    MQAttention,
    RMSNorm,
    Router,
    SwiGLU,
    Tensor,
    TrainConfig,
    Trainer,
    TransformerBlock,
    generate,
)
from nn_cases import ODD, normal

MODEL = MoETransformer(ODD, seed=0)  # context 16, 53 tokens


def trained(**settings: float) -> Trainer:
    return Trainer(MoETransformer(ODD, seed=0), TrainConfig(**settings))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Router(8, 4, 5), "top_k is 5, expected 1 to 4"),
    (lambda: Router(8, 4, 0), "top_k is 0, expected a whole number of at least 1"),
    (lambda: MoETransformer(replace(ODD, top_k_experts=6)), "top_k is 6, expected from 1 to n_experts, 5"),
    (lambda: MoELayer(replace(ODD, n_experts=0, top_k_experts=0)), "n_experts is 0"),
    (lambda: MQAttention(replace(ODD, n_kv_heads=4)), "n_kv_head is 4, expected a divisor of n_head, 6"),
    (lambda: MQAttention(replace(ODD, head_dim=5)), "head_dim is 5, expected an even number"),
    (lambda: TransformerBlock(replace(ODD, hidden_dim=0)), "hidden is 0"),
    (lambda: replace(ODD, n_layers=-1).total_params(), "n_layer is -1"),
    (lambda: Linear(0, 3), "in_features is 0, expected a whole number of at least 1"),
    (lambda: SwiGLU(4, 2.5), "SwiGLU: ffn_dim is 2.5, expected a whole number"),
    (lambda: RMSNorm(-1), "dim is -1"),
    (lambda: Embedding(5, True), "hidden_dim is True"),
    (lambda: Linear(3, 4).forward(normal(2, 5)), r"Linear: `x` is \[2, 5\], expected \[..., 3\]"),
    (lambda: RMSNorm(3).forward(np.float32(1)), r"RMSNorm: `x` is \[\], expected \[..., 3\]"),
    (lambda: SwiGLU(3, 4).forward(normal(4)), r"SwiGLU: `x` is \[4\]"),
    (lambda: MQAttention(ODD).forward(normal(5, 14)), r"`x` is \[5, 14\], expected \[batch, seq, 14\]"),
    (lambda: TransformerBlock(ODD).forward(normal(2, 5, 13)), r"`x` is \[2, 5, 13\], expected \[..., 14\]"),
    (lambda: Linear(3, 4).forward(np.array(["a", "b", "c"])), "expected numbers"),
    (lambda: MODEL.forward([[1, 53]]), "`x` has 53 at position 1, expected 0 to 52"),
    (lambda: MODEL.forward([[1, 2], [-1, 0]]), "`x` has -1 at position 2, expected 0 to 52"),
    (lambda: MODEL.forward(np.array([[0.5]])), "`x` has 0.5 at position 0, expected a whole number"),
    (lambda: MODEL.forward(np.array([[1.0, np.nan]])), "`x` has nan at position 1"),
    (lambda: MODEL.forward([1, 2]), r"`x` is \[2\], expected \[batch, seq\]"),
    (lambda: MODEL.forward(np.zeros((2, 0), np.int64)), r"`x` is \[2, 0\]: there are no tokens"),
    (lambda: MODEL.forward(np.zeros((1, 17), np.int64)), "17 positions, and max_seq_len is 16"),
    (lambda: MQAttention(ODD).forward(normal(1, 17, 14)), "17 positions, and max_seq_len is 16"),
    (lambda: MODEL.forward_ids([1, 2, 3], batch=2), "3 token ids, batch 2 and seq_len 1"),
    (lambda: MODEL.forward_ids([1, 2, 3], batch=0), "batch is 0, expected a whole number of at least 1"),
    (lambda: MODEL.forward_ids([1, 2, 3], batch=1, seq_len=4), "3 token ids, batch 1 and seq_len 4"),
    (lambda: MODEL.generate([], 5), "no tokens"),
    (lambda: MODEL.generate([1, 99], 5), "`prompt` has 99 at position 1"),
    (lambda: MODEL.generate([1], 17), "max_len is 17, and max_seq_len is 16"),
    (lambda: MODEL.generate_top_p([1], 5, top_p=0.0), "topp_sample: `p` is 0"),
    (lambda: MODEL.generate_top_k([1], 5, k=0), "topk_sample: `k` is 0"),
    (lambda: MODEL.generate_sample([1], 5, temperature=-1.0), "sample: `temperature` is -1"),
    (lambda: MODEL.load_tensors({}), "is missing"),
    (lambda: Linear(3, 4).backward(normal(2, 4)), "Linear: backward without a forward"),
    (lambda: MoELayer(ODD).backward(normal(2, 14)), "MoELayer: backward without a forward"),
    (lambda: Router(8, 4, 2).backward(normal(2, 2)), "Router: backward without a forward"),
    (lambda: trained(lr=-1.0), "lr is -1.0, expected a number of at least 0"),
    (lambda: trained(beta2=1.0), "beta2 is 1.0, expected at least 0 and below 1"),
    (lambda: trained(warmup_steps=5, total_steps=4), "warmup_steps is 5 and total_steps 4"),
    (lambda: trained(grad_clip=float("nan")), "grad_clip is nan"),
    (lambda: trained().train_step([[1, 2]], [[1]]), r"`targets` is \[1, 1\], expected \[1, 2\]"),
    (lambda: trained().train_step([[1, 2]], [[1, 53]]), "`targets` has 53 at position 1"),
    (lambda: Linear(3, 4, device="gpu"), "unknown device `gpu`: expected auto, cpu, cuda or cuda:N"),
    (lambda: Trainer(MODEL, TrainConfig(), device="tpu"), "unknown device `tpu`"),
    # a layer is named where its device is wrong
    (lambda: Linear(3, 4, device="gpu"), "^Linear: unknown device"),
    (lambda: SwiGLU(3, 4, device="gpu"), "^SwiGLU: unknown device"),
    (lambda: Embedding(3, 4, device="gpu"), "^Embedding: unknown device"),
    (lambda: RMSNorm(3, device="gpu"), "^RMSNorm: unknown device"),
    (lambda: Router(8, 4, 2, device="gpu"), "^Router: unknown device"),
    (lambda: MQAttention(ODD, device="gpu"), "^MQAttention: unknown device"),
    (lambda: MoELayer(ODD, device="gpu"), "^MoELayer: unknown device"),
    (lambda: TransformerBlock(ODD, device="gpu"), "^TransformerBlock: unknown device"),
    (lambda: MoETransformer(ODD, device="gpu"), "^MoETransformer: unknown device"),
    (lambda: MODEL.to("gpu"), "^MoETransformer.to: unknown device"),
    (lambda: MODEL.to(None), "^MoETransformer.to: device is None; expected"),
    (lambda: Linear(3, 4, device=None), "^Linear: device is None; expected"),
    # numbers that are none, and numbers out of range
    (lambda: AdamW([], device="tpu"), "^AdamW: unknown device `tpu`"),
    (lambda: AdamW([], lr=-1), "AdamW: lr is -1, expected a number of at least 0"),
    (lambda: AdamW([], lr="x"), "AdamW: lr is 'x', expected a number"),
    (lambda: AdamW([], beta1=1.0), "AdamW: beta1 is 1.0, expected at least 0 and below 1"),
    (lambda: AdamW([], eps=float("nan")), "AdamW: eps is nan"),
    (lambda: AdamW([3]), "AdamW: parameter 0 is of type int, expected Tensor"),
    (lambda: AdamW([]).step(-1.0), "AdamW.step: lr is -1.0"),
    (lambda: RMSNorm(3, eps=-1), "RMSNorm: eps is -1, expected a number of at least 0"),
    (lambda: RMSNorm(3, eps="x"), "RMSNorm: eps is 'x', expected a number"),
    (lambda: LRScheduler(1.0, 5, 10).get_lr(-1), "get_lr: step is -1, expected a whole number of at least 0"),
    (lambda: LRScheduler(-1.0, 5, 10), "LRScheduler: lr is -1.0"),
    (lambda: LRScheduler(1.0, 11, 10), "warmup_steps is 11 and total_steps 10"),
    (lambda: trained(lr="x"), "TrainConfig: lr is 'x', expected a number"),
    (lambda: trained(warmup_steps=1.5), "TrainConfig: warmup_steps is 1.5, expected a whole number"),
    (lambda: setattr(trained(), "step", -1), "Trainer: step is -1, expected a whole number of at least 0"),
    (lambda: MODEL.forward_ids([1, 2], batch=2.0), "forward_ids: batch is 2.0, expected a whole number"),
    (lambda: MODEL.forward_ids([1, 2], seq_len=2.0), "forward_ids: seq_len is 2.0, expected a whole number"),
    (lambda: Linear(3, 4, seed=-1), "seed is -1, expected a whole number of at least 0"),
    (lambda: MoETransformer.tiny(seed="x"), "seed is 'x', expected a whole number of at least 0"),
    (lambda: MODEL.generate_sample([1], 5, seed=-1), "seed is -1"),
    (lambda: MODEL.generate_sample([1], 5, temperature="x"), "TemperatureSampling: temperature is 'x'"),
    (lambda: MODEL.generate_top_k([1], 5, k=2.5), "TopKSampling: k is 2.5"),
    (lambda: MODEL.generate([1], 5.0), "max_len is 5.0, expected a whole number"),
    (lambda: MODEL.generate([1] * 17, 16), "`prompt` has 17 tokens, and max_seq_len is 16"),
    (lambda: Linear(3, 4).forward([[1, 2, 3], [4]]), "Linear: `x` is not an array; expected numbers, all rows"),
    (lambda: MODEL.forward([[1, 2], [3]]), "MoETransformer: `x` is not an array"),
    (lambda: Tensor([1]).silu(device=None), "silu: device is None"),
    (lambda: Tensor([1]).softmax(device=3), "softmax: device is 3"),
    (lambda: Tensor([[1]]).matmul(Tensor([[1]]), device=None), "matmul: device is None"),
    (lambda: Tensor([2], "int32") * 2**40, "does not fit int32"),
    (lambda: Tensor([2], "int32") * 2**70, "scale: `other` is of type int, expected numbers"),
    (lambda: MoETransformer(None), "MoETransformer: config is of type NoneType, expected nn.Config"),
    (lambda: MoELayer({}), "MoELayer: config is of type dict"),
    (lambda: Trainer(MODEL, None), "Trainer: config is of type NoneType, expected TrainConfig"),
    (lambda: Trainer(None, TrainConfig()), "Trainer: model is of type NoneType, expected MoETransformer"),
    (lambda: AdamW(None), "AdamW: parameters is of type NoneType, expected a list of tensors"),
    (lambda: AdamW(MODEL), "AdamW: parameters is of type MoETransformer, expected a list of tensors"),
    (lambda: generate(MODEL, [1], 3, "greedy"), "strategy is of type str, expected SamplingStrategy"),
    (lambda: MODEL.load_tensors({n: p.data.astype(str) for n, p in MODEL.named_parameters()}), "expected numbers"),
    (lambda: (MODEL.forward([[1]]), MODEL.total_aux_loss("x")), "alpha is 'x', expected a number"),
    (lambda: MODEL.backward(MODEL.forward([[1]]), aux_loss_alpha="x"), "aux_loss_alpha is 'x', expected a number"),
    (lambda: MODEL.forward_ids([[1, 2], [3]]), "forward_ids: `token_ids` is not an array"),
]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_greedy_refuses_logits_that_are_no_numbers_as_sampling_does(wrong: float):
    model = MoETransformer(ODD, seed=0)
    model.lm_head.weight.data[7] = np.nan
    for way in (model.generate_greedy, model.generate_sample):
        with pytest.raises(InvalidValueError, match="logit"):
            way([1], 5)
    with pytest.raises(InvalidValueError, match=f"greedy: the logit of token 1 is {wrong}, expected a finite number"):
        GreedySampling().pick_token(np.array([0, wrong, 1], np.float32))
    assert GreedySampling().pick_token(np.array([-np.inf, 0, -1], np.float32)) == 1


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_is_refused(number: int):
    wrong, text = REFUSED[number]
    with pytest.raises(InvalidValueError, match=text) as caught:
        wrong()
    assert isinstance(caught.value, ValueError) and caught.value.code is Code.INVALID_VALUE
    assert "\n" not in str(caught.value)


def test_backward_of_another_shape_is_refused():
    x = normal(2, 5, 14)
    for layer in (Linear(14, 14), RMSNorm(14), SwiGLU(14, 3), MQAttention(ODD), MoELayer(ODD), TransformerBlock(ODD)):
        layer.forward(x)
        for shape in [(2, 4, 14), (2, 5, 13), (14,)]:
            with pytest.raises(InvalidValueError):
                layer.backward(normal(*shape))
    router = Router(14, 5, 2)
    router.forward(x)
    with pytest.raises(InvalidValueError, match=r"`grad_output` is \[3, 2\], expected \[10, 2\]"):
        router.backward(normal(3, 2))


def test_a_router_that_sees_no_number_says_which_token():
    layer = MoELayer(ODD, seed=1)
    x = normal(2, 5, 14)
    x[1, 2, 3] = np.nan
    with pytest.raises(InvalidValueError, match="router: a logit of token 7 is NaN"):
        layer.forward(x)


def test_a_router_in_a_model_says_which_block():
    model = MoETransformer(ODD, seed=1)
    model.blocks[1].moe.router.gate.weight._data[0, 0] = np.nan
    with pytest.raises(InvalidValueError, match="^model.layers.1: router: a logit of token 0 is NaN"):
        model.forward_ids([1, 2, 3])


def test_a_step_that_diverges_changes_nothing_and_says_so():
    trainer = trained(lr=1.0)
    trainer.model.lm_head.weight._data[0, 0] = np.inf
    before = [p.data.copy() for p in trainer.model.parameters()]
    with pytest.raises(InvalidValueError, match="step 0 diverged"):
        trainer.train_step([[1, 2, 3]], [[2, 3, 4]])
    assert trainer.step == 0
    assert all((p.data == old).all() for p, old in zip(trainer.model.parameters(), before, strict=True))


def test_a_missing_expert_and_another_shape_are_named():
    tensors = {name: p.data for name, p in MODEL.named_parameters()}
    name = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    with pytest.raises(InvalidValueError, match=f"{name} is missing"):
        MODEL.load_tensors({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(InvalidValueError, match="lm_head.bias is not a parameter"):
        MODEL.load_tensors(tensors | {"lm_head.bias": normal(53)})
    with pytest.raises(InvalidValueError, match=rf"`{name}` is \[11, 14\], expected \[14, 11\]"):
        MODEL.load_tensors(tensors | {name: normal(11, 14)})


@pytest.mark.skipif(ops.cuda_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_with_the_reason():
    for make in (
        lambda: Linear(3, 4, device="cuda"),
        lambda: MoETransformer.tiny(device="cuda:1"),
        lambda: Router(8, 4, 2, device="cuda"),
        lambda: Trainer(MODEL, TrainConfig(), device="cuda"),
        lambda: MODEL.to("cuda"),
        lambda: Tensor.ones((2, 2)).silu(device="cuda"),
    ):
        with pytest.raises(NotAvailableError) as caught:
            make()
        assert isinstance(caught.value, IronhorseError) and caught.value.code is Code.NOT_AVAILABLE
    assert MODEL.device == "auto" and MODEL.blocks[0].moe.device == "auto"


def test_the_device_reaches_every_layer():
    model = MoETransformer(Config.tiny(), seed=0, device="cpu")
    layers = list(model._layers())
    assert len(layers) == 1 + 3 + 2 * (1 + 1 + 1 + 4 + 1 + 1 + 2 + 4 * 4)
    assert all(layer.device == "cpu" for layer in layers)
    assert all(layer.device == "auto" for layer in model.to("auto")._layers())
