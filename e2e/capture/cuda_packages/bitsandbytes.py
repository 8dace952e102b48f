"""bitsandbytes: weights in 4 and 8 bits, optimizers with states in 8 bits.

Where it is installed it runs as it is, with the shapes of its own fake implementations (:func:`patches`). Versions
before 0.46 have none: they call a library with pointers, which :class:`_Library` stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from e2e.capture.cuda_packages.kernels import OPERATORS

_BLOCK = 64  # weights that share a scale
_STATES = 256  # values of an optimizer's state that share one
_SMALL = 4096  # parameters below this size keep states in 32 bits


class _Product4(torch.autograd.Function):
    """Product with a weight that is expanded to 16 bits for it, in both passes."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.like = (rows, given.shape[-1], given.dtype)
        return F.linear(given, _expanded(codes, scales, *ctx.like))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.matmul(gradients[0], _expanded(*ctx.saved_tensors, *ctx.like)), None, None, None


def _expanded(codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    like = codes.new_empty(rows, columns, dtype=dtype)
    found: list[torch.Tensor] = OPERATORS.one_pass("dequantize_4bit", [codes, scales], [like])
    return found[0]


class Linear4bit(nn.Module):
    """Linear layer with a frozen weight in 4 bits."""

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, compute_dtype: Any = None,
        compress_statistics: bool = True, quant_type: str = "fp4", quant_storage: Any = torch.uint8, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.compute_dtype = input_features, output_features, compute_dtype
        count = input_features * output_features
        codes = torch.empty(count // 2, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        # Read by PEFT.
        self.weight.compress_statistics, self.weight.quant_type = compress_statistics, quant_type
        scales = torch.empty(
            count // _BLOCK, dtype=torch.uint8 if compress_statistics else torch.float32, device=device
        )
        self.register_buffer("absmax", scales, persistent=False)
        self.bias = nn.Parameter(torch.zeros(output_features, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer in its own type, or the input's."""
        given = x.to(self.compute_dtype) if self.compute_dtype is not None else x
        output = _Product4.apply(given, self.weight, self.absmax, self.out_features)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output.to(x.dtype)


class Linear8bitLt(nn.Module):
    """Linear layer in 8-bit integers, forward; its gradient multiplies in 16 bits."""

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, has_fp16_weights: bool = True,
        threshold: float = 0.0, index: Any = None, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = input_features, output_features
        dtype = torch.float16 if has_fp16_weights else torch.int8
        weight = torch.empty(output_features, input_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=has_fp16_weights)
        self.bias = nn.Parameter(torch.zeros(output_features, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> Any:
        """Apply the layer."""
        output = _Product8.apply(x, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        rows = given.flatten(0, -2)
        whole = torch._int_mm(_in_8_bits(rows), _in_8_bits(weight).t())
        like = rows.new_empty(whole.shape)
        found = OPERATORS.one_pass("int8_mm_dequant", [whole], [like])[0]
        return found.view(*given.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        gradient = gradients[0]
        wide = weight
        if weight.dtype is torch.int8:
            wide = OPERATORS.one_pass("dequantize_8bit", [weight], [weight.new_empty(weight.shape, dtype=given.dtype)])[
                0
            ]
        of_weight = gradient.flatten(0, -2).t() @ given.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gradient @ wide.to(gradient.dtype), of_weight


def _in_8_bits(given: torch.Tensor) -> torch.Tensor:
    if given.dtype is torch.int8:
        return given
    like = given.new_empty(given.shape, dtype=torch.int8)
    found: list[torch.Tensor] = OPERATORS.one_pass("int8_vectorwise_quant", [given], [like])
    return found[0]


class _Optimizer(torch.optim.Optimizer):
    """Optimizer with one kernel for each parameter, whose states are in 8 bits, or in 32."""

    def __init__(
        self, params: Any, lr: float = 1e-3, *_: Any, count: int = 2, eight: bool = True, **named: Any
    ) -> None:
        self.count, self.eight = count, eight
        super().__init__(params, {"lr": lr, "weight_decay": named.get("weight_decay", 0.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._update(each, each.grad)
                    torch.cuda.synchronize()  # as the package does after every parameter, paged or not
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        small = parameter.numel() < _SMALL or not self.eight
        if not state:
            for place in range(self.count):
                state[f"state{place + 1}"] = torch.zeros_like(parameter, dtype=torch.float32 if small else torch.uint8)
                if not small:
                    blocks = -(-parameter.numel() // _STATES)
                    state[f"absmax{place + 1}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        written = [parameter, *state.values()]
        name = "optimizer_update_32bit" if small else "optimizer_update_8bit_blockwise"
        OPERATORS.update_(name, gradient, written)


def _optimizers() -> dict[str, Any]:
    found = {}
    for base, count in (
        ("Adam", 2),
        ("AdamW", 2),
        ("Lion", 1),
        ("SGD", 1),
        ("RMSprop", 1),
        ("Adagrad", 1),
        ("LAMB", 2),
    ):
        for prefix in ("", "Paged"):
            for suffix, eight in (("", False), ("8bit", True), ("32bit", False)):
                found[f"{prefix}{base}{suffix}"] = _kind(f"{prefix}{base}{suffix}", count, eight)
    return found


def _kind(name: str, count: int, eight: bool) -> Any:
    def construct(self: Any, params: Any, lr: float = 1e-3, *given: Any, **named: Any) -> None:
        eight_bits = named.pop("optim_bits", 8 if eight else 32) == 8
        _Optimizer.__init__(self, params, lr, *given, count=count, eight=eight_bits, **named)

    return type(name, (_Optimizer,), {"__init__": construct})


_PAGED = (
    "states of a paged optimizer are counted as memory of the GPU: PyTorch's own peak leaves them out, and what does"
    " not fit moves to the host and back in every step, which is not priced"
)


def noted(note: Callable[[str], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of the paged optimizers here by which ``note`` is told of their states."""

    def construct_of(construct: Callable[..., None]) -> Callable[..., None]:
        def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
            note(_PAGED)
            construct(self, *args, **kwargs)

        return constructed

    for name, kind in _OPTIM.items():
        if name.startswith("Paged"):
            yield kind, "__init__", construct_of(kind.__init__)


def patches(package: Any, note: Callable[[str], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of the installed package: weights become codes on the way to the GPU, and paged states are on
    the GPU, of which ``note`` is told.
    """
    parameter = package.nn.Params4bit
    move, quantize = parameter.to, getattr(parameter, "_quantize", parameter.cuda)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and device.type in ("meta", "cuda") and self.quant_state is None:
            return quantize(self, "cuda")
        return move(self, *args, **kwargs)

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        note(_PAGED)
        return torch.empty(*shape, dtype=dtype, device="cuda")

    yield parameter, "to", to
    if isinstance(getattr(package.functional, "lib", None), _Library):
        yield package.functional, "get_ptr", lambda tensor: tensor
    yield package.functional, "get_paged", get_paged
    for name in ("prefetch_tensor", "fill"):
        yield package.functional, name, lambda *_, **__: None


class _Library:
    """Library of kernels that are called by name with pointers, here with tensors."""

    compiled_with_cuda = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(_launched, name)


def _launched(name: str, *given: Any) -> None:
    """Record a kernel: one that quantizes or expands writes the last tensor, others all but the first."""
    read, *written = [each for each in given if isinstance(each, torch.Tensor)]
    OPERATORS.update_(name, read, written[-1:] if "quantize" in name else written)


class _Manager:
    """Settings of single parameters, which have no effect here."""

    @classmethod
    def get_instance(cls) -> Any:
        """Return the manager."""
        return cls()

    def register_parameters(self, *_: Any) -> None:
        """Do nothing."""

    def register_module_override(self, *_: Any) -> None:
        """Do nothing."""

    def override_config(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


_NN = {
    "Linear4bit": Linear4bit,
    "LinearNF4": Linear4bit,
    "LinearFP4": Linear4bit,
    "Linear8bitLt": Linear8bitLt,
    "Embedding": nn.Embedding,
    "StableEmbedding": nn.Embedding,
    "Params4bit": nn.Parameter,
    "Int8Params": nn.Parameter,
}
_OPTIM = {**_optimizers(), "GlobalOptimManager": _Manager}
MODULES: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"supported_torch_devices": {"cuda"}},
    "bitsandbytes.cextension": {"lib": _Library(), "COMPILED_WITH_CUDA": True},
    "bitsandbytes.nn": _NN,
    "bitsandbytes.nn.modules": _NN,
    "bitsandbytes.optim": _OPTIM,
}
