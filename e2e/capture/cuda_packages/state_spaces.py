"""State spaces: ``mamba_ssm`` with its layers, and ``causal_conv1d``, by the operators of
:mod:`e2e.capture.linear_attention`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from e2e.capture.cuda_packages.flash_attention import RMSNorm, layer_norm_fn, rms_norm_fn
from e2e.capture.linear_attention import (
    causal_conv,
    causal_conv_update,
    chunk_scan,
    mamba_inner,
    selective_scan,
    split_conv_scan,
    state_update,
)


def _parameter(*shape: int, like: dict[str, Any], dtype: Any = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=like.get("device"), dtype=dtype or like.get("dtype")))


class Mamba(nn.Module):
    """Layer of Mamba 1."""

    def __init__(
        self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, dt_rank: Any = "auto", *_: Any,
        conv_bias: bool = True, bias: bool = False, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        like: dict[str, Any] = {name: named.get(name) for name in ("device", "dtype")}
        inner = expand * d_model
        rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * inner, bias, **like)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias, **like)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, False, **like)
        self.dt_proj = nn.Linear(rank, inner, True, **like)
        self.A_log = _parameter(inner, d_state, like=like, dtype=torch.float32)
        self.D = _parameter(inner, like=like, dtype=torch.float32)
        self.out_proj = nn.Linear(inner, d_model, bias, **like)

    def forward(self, hidden_states: torch.Tensor, inference_params: Any = None, **_: Any) -> Any:
        """Apply the layer to (batch, length, width)."""
        both = self.in_proj(hidden_states).transpose(1, 2)
        decay = -torch.exp(self.A_log.float())
        return mamba_inner(
            both, self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight, self.out_proj.weight,
            self.out_proj.bias, decay, None, None, self.D.float(), self.dt_proj.bias.float(), delta_softplus=True,
        )  # fmt: skip


class Mamba2(nn.Module):
    """Layer of Mamba 2."""

    def __init__(
        self, d_model: int, d_state: int = 128, d_conv: int = 4, conv_init: Any = None, expand: int = 2,
        headdim: int = 64, *_: Any, ngroups: int = 1, rmsnorm: bool = True, bias: bool = False, conv_bias: bool = True,
        chunk_size: int = 256, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        like: dict[str, Any] = {name: named.get(name) for name in ("device", "dtype")}
        inner = expand * d_model
        heads, channels = inner // headdim, inner + 2 * ngroups * d_state
        self.headdim, self.ngroups, self.chunk_size, self.rmsnorm = headdim, ngroups, chunk_size, rmsnorm
        self.in_proj = nn.Linear(d_model, inner + channels + heads, bias, **like)
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, padding=d_conv - 1, bias=conv_bias, **like)
        self.dt_bias, self.A_log, self.D = (_parameter(heads, like=like, dtype=torch.float32) for _ in range(3))
        self.norm = RMSNorm(inner, **like) if rmsnorm else None
        self.out_proj = nn.Linear(inner, d_model, bias, **like)

    def forward(self, u: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Apply the layer to (batch, length, width)."""
        return split_conv_scan(
            self.in_proj(u), self.conv1d.weight.squeeze(1), self.conv1d.bias, self.dt_bias, -torch.exp(self.A_log),
            self.D, self.chunk_size, rmsnorm_weight=self.norm.weight if self.norm is not None else None,
            outproj_weight=self.out_proj.weight, outproj_bias=self.out_proj.bias, headdim=self.headdim,
            ngroups=self.ngroups,
        )  # fmt: skip


class _Block(nn.Module):
    """Norm of the sum, and the layer."""

    def __init__(self, width: int, mixer: nn.Module, like: dict[str, Any]) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(width, **like), mixer

    def forward(self, states: Any, residual: Any) -> Any:
        found = self.norm(states, residual, prenorm=True)
        return self.mixer(found[0]), found[1]


class MambaConfig:
    """Sizes of a model of mamba_ssm."""

    def __init__(
        self, d_model: int = 2560, d_intermediate: int = 0, n_layer: int = 64, vocab_size: int = 50277,
        ssm_cfg: Any = None, **others: Any,
    ) -> None:  # fmt: skip
        self.d_model, self.n_layer, self.vocab_size, self.ssm_cfg = d_model, n_layer, vocab_size, ssm_cfg or {}
        self.multiple = others.get("pad_vocab_size_multiple", 8)


class MambaLMHeadModel(nn.Module):
    """Language model of Mamba layers."""

    def __init__(self, config: Any, initializer_cfg: Any = None, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        like = {"device": device, "dtype": dtype}
        words = -(-config.vocab_size // getattr(config, "multiple", 8)) * getattr(config, "multiple", 8)
        settings = dict(config.ssm_cfg)
        kind = Mamba2 if settings.pop("layer", "Mamba1") == "Mamba2" else Mamba
        self.embedding = nn.Embedding(words, config.d_model, **like)
        self.layers = nn.ModuleList(
            _Block(config.d_model, kind(config.d_model, **settings, **like), like) for _ in range(config.n_layer)
        )
        self.norm_f = RMSNorm(config.d_model, **like)
        self.lm_head = nn.Linear(config.d_model, words, False, **like)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the scores."""
        states, residual = self.embedding(input_ids), None
        for layer in self.layers:
            states, residual = layer(states, residual)
        states = self.norm_f(states, residual) if residual is not None else self.norm_f(states)
        return SimpleNamespace(logits=F.linear(states, self.lm_head.weight))


_SCAN = {"selective_scan_fn": selective_scan, "mamba_inner_fn": mamba_inner, "selective_scan_ref": selective_scan}
_CHUNKS = {"mamba_chunk_scan_combined": chunk_scan, "mamba_split_conv1d_scan_combined": split_conv_scan}
_NORMS = {"RMSNorm": RMSNorm, "rms_norm_fn": rms_norm_fn, "layer_norm_fn": layer_norm_fn}
_CONVOLUTION = {"causal_conv1d_fn": causal_conv, "causal_conv1d_update": causal_conv_update}
MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {**_SCAN, "Mamba": Mamba, "Mamba2": Mamba2, "MambaLMHeadModel": MambaLMHeadModel},
    "mamba_ssm.modules.mamba_simple": {"Mamba": Mamba},
    "mamba_ssm.modules.mamba2": {"Mamba2": Mamba2},
    "mamba_ssm.modules.mamba2_simple": {"Mamba2Simple": Mamba2},
    "mamba_ssm.models.mixer_seq_simple": {"MambaLMHeadModel": MambaLMHeadModel},
    "mamba_ssm.models.config_mamba": {"MambaConfig": MambaConfig},
    "mamba_ssm.ops.selective_scan_interface": _SCAN,
    "mamba_ssm.ops.triton.ssd_combined": _CHUNKS,
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": state_update},
    "mamba_ssm.ops.triton.layer_norm": _NORMS,
    "mamba_ssm.ops.triton.layernorm": _NORMS,
    "causal_conv1d": _CONVOLUTION,
    "causal_conv1d.causal_conv1d_interface": _CONVOLUTION,
}
