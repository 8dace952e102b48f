"""Linear attention as fused kernels of libraries: Mamba 1 and 2 (mamba_ssm), gated delta rules
(flash-linear-attention), and their short convolutions (causal_conv1d).

Modules of Transformers call such a kernel if its library is installed, and otherwise single PyTorch operators, which
nobody trains with. The libraries need a GPU, so they are seldom installed where a step is predicted: here the calls are
recorded as one operator without effect each, and one of its gradients, if the library is installed or ``fused`` is
requested. Products and norms that the libraries fuse into longer calls are recorded separately, in their order. Imports
``torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import linear

from e2e.step.options import LinearAttentionForm

NAMESPACE = "scan"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LINEAR = "Tensor query, Tensor key, Tensor value, Tensor[] gates"
_HOW = "str kind, int chunk, bool keeps, bool token"
_SELECTIVE = "Tensor data, Tensor delta, Tensor decay, Tensor read, Tensor write, Tensor[] others"
_NORM = "Tensor data, Tensor gate, Tensor weight"
for _schema in (
    "causal_conv(Tensor data, Tensor weight) -> Tensor",
    "causal_conv_backward(Tensor gradient, Tensor data, Tensor weight) -> (Tensor, Tensor)",
    "causal_conv_update(Tensor data, Tensor weight, Tensor state) -> Tensor",
    f"linear_attention({_LINEAR}, Tensor? states, {_HOW}) -> (Tensor, Tensor)",
    f"linear_attention_backward(Tensor gradient, {_LINEAR}, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor[])",
    f"selective({_SELECTIVE}) -> (Tensor, Tensor)",
    f"selective_backward(Tensor gradient, {_SELECTIVE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
    "selective_update(Tensor data, Tensor states, Tensor? gate) -> Tensor",
    f"gated_norm({_NORM}) -> Tensor",
    f"gated_norm_backward(Tensor gradient, {_NORM}) -> (Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema)


def _alike(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(each) for each in tensors)


def _linear(query: Any, key: Any, value: Any, gates: Any, states: Any, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and states; ``value``: (batch, length, heads, width), ``key``: (batch, length, heads or groups of
    them, states).
    """
    _, _, keeps, _ = how
    batch, _, heads, width = value.shape
    shape = (batch, heads, key.shape[-1], width) if keeps else (0,)
    return torch.empty_like(value, memory_format=torch.contiguous_format), value.new_empty(shape, dtype=torch.float32)


def _selective(data: Any, delta: Any, decay: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and states; ``data``: (batch, channels, length), ``decay``: (channels, states)."""
    return torch.empty_like(data), data.new_empty((*data.shape[:2], decay.shape[-1]), dtype=torch.float32)


def _linear_gradients(gradient: Any, query: Any, key: Any, value: Any, gates: Any, *_: Any) -> Any:
    return (*_alike(query, key, value), list(_alike(*gates)))


def _selective_gradients(gradient: Any, *given: Any) -> Any:
    return (*_alike(*given[:5]), list(_alike(*given[5])))


def _like_data(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(data)


for _name, _result in (
    ("causal_conv", _like_data),
    ("causal_conv_backward", lambda gradient, *given: _alike(*given)),
    ("causal_conv_update", _like_data),
    ("linear_attention", _linear),
    ("linear_attention_backward", _linear_gradients),
    ("selective", _selective),
    ("selective_backward", _selective_gradients),
    ("selective_update", _like_data),
    ("gated_norm", _like_data),
    ("gated_norm_backward", lambda gradient, *given: _alike(*given)),
):
    _LIBRARY.impl(_name, _result, "Meta")
_ops = torch.ops.scan


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Any, weight: Any, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(data, weight)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        return _ops.causal_conv(data, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        data, weight = ctx.saved_tensors
        of_data, of_weight = _ops.causal_conv_backward(gradients[0], data, weight)
        # The kernel writes it together with the weights' gradient.
        of_bias = None if ctx.bias is None else data.new_empty(ctx.bias[0], dtype=ctx.bias[1])
        return of_data, of_weight, of_bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, states: Any, how: tuple[Any, ...], *gates: Any) -> Any:
        ctx.save_for_backward(query, key, value, *gates)
        ctx.how = how
        output, last = _ops.linear_attention(query, key, value, list(gates), states, *how)
        ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *gates = ctx.saved_tensors
        found = _ops.linear_attention_backward(gradients[0], query, key, value, gates, *ctx.how)
        return (*found[:3], None, None, *found[3])


class _Selective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        ctx.save_for_backward(*given)
        output, last = _ops.selective(*given[:5], list(given[5:]))
        ctx.mark_non_differentiable(last)
        return output, last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors
        found = _ops.selective_backward(gradients[0], *given[:5], list(given[5:]))
        return (*found[:5], *found[5])


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Any, gate: Any, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(data, gate, weight)
        return _ops.gated_norm(data, gate, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return tuple(_ops.gated_norm_backward(gradients[0], *ctx.saved_tensors))


# --- replacements of the libraries' functions, with their arguments ------------------------------------


def causal_conv(data: Any, weight: Any, bias: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """Replace ``causal_conv1d_fn`` on (batch, channels, length)."""
    return _Convolution.apply(data, weight, bias)


def causal_conv_update(data: Any, conv_state: Any, weight: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Replace ``causal_conv1d_update``: one token, with the cache of the last ones."""
    return _ops.causal_conv_update(data, weight, conv_state)


def chunk_scan(
    data: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None,
    initial_states: Any = None, return_final_states: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Replace ``mamba_chunk_scan_combined`` of Mamba 2; ``z``, a gate, is multiplied in."""
    gates = [each for each in (dt, A, D, z, dt_bias) if each is not None]
    keeps = return_final_states or initial_states is not None
    output, last = _Linear.apply(C, B, data, initial_states, ("ssd", int(chunk_size), keeps, False), *gates)
    return (output, last) if return_final_states else output


def split_conv_scan(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,
    initial_states: Any = None, return_final_states: bool = False, rmsnorm_weight: Any = None,
    outproj_weight: Any = None, outproj_bias: Any = None, headdim: int | None = None, ngroups: int = 1, **_: Any,
) -> Any:  # fmt: skip
    """Replace ``mamba_split_conv1d_scan_combined``: all of a Mamba 2 layer after its first product."""
    heads = A.shape[0]
    inner = heads * headdim if headdim else D.numel()
    channels = conv1d_weight.shape[0]
    gate, mixed, dt = zxbcdt.split([zxbcdt.shape[-1] - channels - heads, channels, heads], dim=-1)
    mixed = causal_conv(mixed.transpose(1, 2), conv1d_weight, conv1d_bias).transpose(1, 2)
    states = (channels - inner) // 2
    data, write, read = mixed.split([inner, states, states], dim=-1)
    found = chunk_scan(
        data.unflatten(-1, (heads, -1)), dt, A, write.unflatten(-1, (ngroups, -1)), read.unflatten(-1, (ngroups, -1)),
        chunk_size, D, dt_bias=dt_bias, z=gate if rmsnorm_weight is None else None,
        initial_states=initial_states, return_final_states=return_final_states,
    )  # fmt: skip
    output, last = found if return_final_states else (found, None)
    output = output.flatten(-2)
    if rmsnorm_weight is not None:
        output = _GatedNorm.apply(output, gate, rmsnorm_weight)
    if outproj_weight is not None:
        output = linear(output, outproj_weight, outproj_bias)
    return (output, last) if return_final_states else output


def selective_scan(
    data: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
    delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Replace ``selective_scan_fn`` of Mamba 1."""
    others = [each for each in (z, D, delta_bias) if each is not None]
    output, last = _Selective.apply(data, delta, A, B, C, *others)
    return (output, last) if return_last_state else output


def mamba_inner(
    xz: Any, conv1d_weight: Any, conv1d_bias: Any, x_proj_weight: Any, delta_proj_weight: Any, out_proj_weight: Any,
    out_proj_bias: Any, A: Any, B: Any = None, C: Any = None, D: Any = None, delta_bias: Any = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Replace ``mamba_inner_fn``: all of a Mamba 1 layer after its first product."""
    data, gate = xz.chunk(2, dim=1)
    data = causal_conv(data, conv1d_weight.flatten(1), conv1d_bias)
    rank, states = delta_proj_weight.shape[1], A.shape[-1]
    small = linear(data.transpose(1, 2), x_proj_weight)
    delta, write, read = small.split([rank, states, states], dim=-1)
    delta = linear(delta, delta_proj_weight).transpose(1, 2)
    output = selective_scan(data, delta, A, write.transpose(1, 2), read.transpose(1, 2), D, gate, delta_bias)
    return linear(output.transpose(1, 2), out_proj_weight, out_proj_bias)


def state_update(
    state: Any, data: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None, **_: Any
) -> torch.Tensor:
    """Replace ``selective_state_update`` of Mamba 1 and 2: one token."""
    return _ops.selective_update(data, state, z)


def delta_rule(
    kind: str, token: bool, query: Any, key: Any, value: Any, g: Any = None, beta: Any = None,
    initial_state: Any = None, output_final_state: bool = False, **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Replace ``chunk_gated_delta_rule``, ``fused_recurrent_gated_delta_rule`` and similar with a decay per
    dimension.
    """
    gates = [each for each in (g, beta) if each is not None]
    keeps = output_final_state or initial_state is not None
    chunk = int(others.get("chunk_size", 64))
    output, last = _Linear.apply(query, key, value, initial_state, (kind, chunk, keeps, token), *gates)
    return output, last if output_final_state else None


_INSTEAD: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv,
    "causal_conv1d_update": causal_conv_update,
    "mamba_inner_fn": mamba_inner,
    "selective_scan_fn": selective_scan,
    "selective_state_update": state_update,
    "mamba_chunk_scan_combined": chunk_scan,
    "mamba_split_conv1d_scan_combined": split_conv_scan,
    "chunk_gated_delta_rule": partial(delta_rule, "gated_delta", False),
    "fused_recurrent_gated_delta_rule": partial(delta_rule, "gated_delta", True),
    "chunk_kda": partial(delta_rule, "kimi_delta", False),
    "fused_recurrent_kda": partial(delta_rule, "kimi_delta", True),
}


@contextmanager
def linear_attention_kernels(form: LinearAttentionForm | None) -> Iterator[None]:
    """Context in which imported modules of Transformers call replacements of the libraries' kernels: all with
    ``fused``, none with ``unfused``, those with an installed library with None.
    """
    with ExitStack() as stack:
        if form != "unfused":
            for module, attribute, name, installed in _library_calls():
                if installed or form == "fused":
                    stack.enter_context(patch.object(module, attribute, _INSTEAD[name]))
        yield


def _library_calls() -> Iterator[tuple[Any, str, str, bool]]:
    """Yield the functions of Transformers' models with a library kernel: module, name there, name of the kernel, and
    True if its library is installed.
    """
    for path, module in list(sys.modules.items()):
        if not path.startswith("transformers.models.") or ".modeling_" not in path:
            continue
        for attribute, value in list(vars(module).items()):
            found = _kernel_of(value)
            if found is not None and found[0] in _INSTEAD:
                yield module, attribute, *found


def _kernel_of(function: Any) -> tuple[str, bool] | None:
    """Return the name of the kernel that ``function`` replaces and True if its library is installed, or None.

    Both are stored by ``use_kernel_func_from_hub_with_fallback`` of Transformers in the function it returns.
    """
    while callable(function):
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        known = {} if code is None or cells is None else dict(zip(code.co_freevars, cells, strict=True))
        if "func_name" in known and "is_new_implementation" in known:
            return str(known["func_name"].cell_contents), bool(known["is_new_implementation"].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return None
