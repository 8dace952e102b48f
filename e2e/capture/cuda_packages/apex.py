"""Apex: fused norms and optimizers, ``amp``, data parallelism. Its optimizers keep their state in 32 bits and take a
few kernels for all parameters. ``amp`` at level O2 gives any optimizer copies of the parameters in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from e2e.capture.cuda_packages.kernels import norm
from e2e.capture.cuda_packages.parallel_layers import add_product


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm in one kernel."""

    kind = "layer_norm"

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False,
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> Any:
        """Return the norm of the last dimensions."""
        rows = input.flatten(-len(self.normalized_shape))
        flat = [None if each is None else each.flatten() for each in (self.weight, self.bias)]
        return norm(rows, self.kind, *flat).view_as(input)


class FusedRMSNorm(FusedLayerNorm):
    """RMS norm in one kernel."""

    kind = "rms_norm"

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **named: Any) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.bias = None  # type: ignore[assignment]


def _affine_norm(input: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float = 1e-6, *_: Any) -> Any:
    """Return the layer norm of the last dimensions."""
    rows = input.flatten(-len(shape))
    return norm(rows, "layer_norm", weight.flatten(), bias.flatten()).view_as(input)


class _FusedOptimizer(torch.optim.Optimizer):
    """Optimizer whose kernels run over all parameters of a type."""

    # State of the size of a parameter.
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or set them to zero."""
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None, *_: Any, **__: Any) -> Any:
        """Update the parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            having = [each for each in group["params"] if each.grad is not None]
            for dtype in dict.fromkeys(each.dtype for each in having):
                chosen = [each for each in having if each.dtype is dtype]
                for each in chosen:
                    if not self.state[each]:
                        self.state[each] = {name: torch.zeros_like(each, dtype=torch.float32) for name in self.names}
                states = [[self.state[each][name] for each in chosen] for name in self.names]
                self.update(group, chosen, [each.grad for each in chosen], states)
        return loss

    def update(self, group: Any, parameters: Any, gradients: Any, states: Any) -> None:
        """Update the ``parameters`` of a group that have one type."""
        raise NotImplementedError


class FusedAdam(_FusedOptimizer):
    """Adam in one kernel."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
        capturable: bool = False, master_weights: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master = master_weights

    def update(self, group: Any, parameters: Any, gradients: Any, states: Any) -> None:
        """Update in one kernel, 32-bit copies of 16-bit parameters with them."""
        wide: list[list[torch.Tensor]] = []
        if self.master and parameters[0].dtype is not torch.float32:
            for each in parameters:
                self.state[each].setdefault("master_param", torch.zeros_like(each, dtype=torch.float32))
            wide = [[self.state[each]["master_param"] for each in parameters]]
        others = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_(
            parameters, gradients, *states, *(wide or [[]]), [], **others, amsgrad=bool(wide), maximize=False
        )


class FusedSGD(_FusedOptimizer):
    """Stochastic gradient descent in one kernel."""

    names = ("momentum_buffer",)

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, *_: Any, **named: Any) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def update(self, group: Any, parameters: Any, gradients: Any, states: Any) -> None:
        """Update in one kernel."""
        torch._fused_sgd_(
            parameters, gradients, states[0] if group["momentum"] else [], weight_decay=0.0,
            momentum=group["momentum"], lr=1e-3, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


class FusedLAMB(_FusedOptimizer):
    """LAMB: norms of the gradients, Adam's update, its norms and the parameters', the step."""

    def __init__(self, params: Any, lr: float = 1e-3, *_: Any, **named: Any) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, group: Any, parameters: Any, gradients: Any, states: Any) -> None:
        """Update in two kernels besides the norms."""
        torch._foreach_norm(gradients)
        torch._fused_adamw_(
            gradients, parameters, *states, [], [], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_norm(parameters)
        torch._foreach_norm(gradients)
        torch._foreach_add_(parameters, gradients, alpha=-1e-3)


class FusedNovoGrad(FusedAdam):
    """NovoGrad, which moves about what Adam does."""


# --- amp -----------------------------------------------------------------------------------------------


class _LossScaler:
    """Scale of a loss. Unless it is a number of the program's, the host reads after each pass whether a gradient has
    overflowed, which changes it.
    """

    def __init__(self) -> None:
        self.dynamic = True
        self._loss_scale = 65536.0
        self._overflow_buf: torch.Tensor | None = None

    def loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def update_scale(self) -> bool:
        """Read whether a gradient has overflowed: none has."""
        if self.dynamic and self._overflow_buf is not None:
            self._overflow_buf.item()
        return False


# What ``amp`` holds for all models: whether gradients are scaled, and its scales.
_STATE = SimpleNamespace(
    scaled=False, loss_scalers=[_LossScaler()], opt_properties=SimpleNamespace(master_weights=False, enabled=True)
)


class _Masters:
    """Copies in 32 bits of the ``halves``, an optimizer's parameters of 16 bits, which it updates in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.halves: list[torch.Tensor] = []
        self.all_fp32_from_fp16_params: list[torch.Tensor] = []
        self.lazy_init_called = True
        # True from a pass whose gradients are to be unscaled with those of the next one.
        self.delayed = False
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype is torch.float16 and parameter.requires_grad:
                    master = nn.Parameter(parameter.detach().float())
                    self.halves.append(parameter)
                    self.all_fp32_from_fp16_params.append(master)
                    group["params"][place] = master
                    if parameter in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(parameter)
        step, zero_grad = optimizer.step, optimizer.zero_grad

        def stepped(_: Any, *given: Any, **named: Any) -> Any:
            found = step(*given, **named)
            with torch.no_grad():
                torch._foreach_copy_(self.halves, self.all_fp32_from_fp16_params)
            return found

        def zeroed(_: Any, *given: Any, **named: Any) -> None:
            zero_grad(*given, **named)
            self.forget()

        if self.halves:
            optimizer.step = MethodType(stepped, optimizer)  # type: ignore[method-assign]
            optimizer.zero_grad = MethodType(zeroed, optimizer)  # type: ignore[method-assign]

    def forget(self) -> None:
        """Free the gradients of 16 bits."""
        for each in self.halves:
            each.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradients of 16 bits to those of 32, in a kernel for all parameters."""
        found = zip(self.halves, self.all_fp32_from_fp16_params, strict=True)
        pairs = [(half.grad, master) for half, master in found if half.grad is not None]
        first = [(gradient, master) for gradient, master in pairs if master.grad is None]
        later = [(gradient, master.grad) for gradient, master in pairs if master.grad is not None]
        for _, master in first:
            master.grad = torch.empty_like(master)
        if first:
            torch._foreach_copy_([master.grad for _, master in first], [gradient for gradient, _ in first])
        if later:
            torch._foreach_add_([total for _, total in later], [gradient for gradient, _ in later])


def _all(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", cast_model_type: Any = None,
    patch_torch_functions: Any = None, keep_batchnorm_fp32: Any = None, master_weights: Any = None,
    loss_scale: Any = None, cast_model_outputs: Any = None, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """Set the precision of models: O1 casts by operator, O2 and O3 keep parameters in 16 bits, of which O2 gives the
    optimizer copies in 32.
    """
    halved = enabled and opt_level in ("O2", "O3")
    for model in _all(models) if enabled and opt_level != "O0" else []:
        if opt_level == "O1":
            model.forward = torch.autocast("cuda", dtype=torch.float16)(model.forward)
        else:
            _halve(model, opt_level == "O2" and keep_batchnorm_fp32 in (None, True, "True"), cast_model_outputs)
    if enabled and opt_level in ("O1", "O2"):
        _STATE.scaled = True
        (scaler,) = _STATE.loss_scalers
        scaler.dynamic = loss_scale in (None, "dynamic")
        scaler._loss_scale = 65536.0 if scaler.dynamic else float(loss_scale)
    _STATE.opt_properties.master_weights = halved and opt_level == "O2"
    for optimizer in _all(optimizers) if halved and opt_level == "O2" and optimizers is not None else []:
        optimizer._amp_stash = _Masters(optimizer)
    return models if optimizers is None else (models, optimizers)


def _halve(model: nn.Module, norms_stay: bool, outputs: torch.dtype | None) -> None:
    model.half()
    for module in model.modules():
        if norms_stay and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.float()
    forward = model.forward

    def to(kind: torch.dtype, value: Any) -> Any:
        return value.to(kind) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    @wraps(forward)
    def cast(*given: Any, **named: Any) -> Any:
        given, named = tree_map(partial(to, torch.float16), (given, named))
        return tree_map(partial(to, outputs or torch.float32), forward(*given, **named))

    model.forward = cast


@contextmanager
def scale_loss(
    loss: torch.Tensor, optimizers: Any, loss_id: int = 0, model: Any = None, delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """Context with the scaled loss; on exit the gradients are unscaled, those of 16 bits into their copies, and the
    host reads whether one overflowed.
    """
    if not _STATE.scaled:
        yield loss
        return
    masters = [each._amp_stash for each in _all(optimizers) if hasattr(each, "_amp_stash")]
    for each in masters:
        if not each.delayed:
            each.forget()
        each.delayed = delay_unscale
    (scaler,) = _STATE.loss_scalers
    yield loss.float() * scaler.loss_scale()
    if delay_unscale:
        return
    for each in masters:
        each.gather()
    copies = {id(master) for each in masters for master in each.all_fp32_from_fp16_params}
    wide = [each for each in master_params(optimizers) if id(each) not in copies]
    gradients = [each.grad for each in wide if each.grad is not None and not each.grad.is_sparse]
    scaler._overflow_buf = loss.new_zeros(1, dtype=torch.float32)
    if gradients and (scaler.dynamic or scaler.loss_scale() != 1.0):
        inverse = loss.new_ones(1, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, scaler._overflow_buf, inverse)
    if not delay_overflow_check:
        scaler.update_scale()


def master_params(optimizers: Any) -> Iterator[torch.Tensor]:
    """Iterate over the parameters of optimizers."""
    for optimizer in _all(optimizers):
        for group in optimizer.param_groups:
            yield from group["params"]


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: what it calls is cast by operator."""
    return function


# --- parallel, lists of tensors ---------------------------------------------------------------------------


def data_parallel(module: nn.Module, *_: Any, **__: Any) -> Any:
    """Return PyTorch's data parallelism, which sums the same buckets: of the parameters that the first step uses."""
    return nn.parallel.DistributedDataParallel(module, device_ids=[torch.cuda.current_device()], static_graph=True)


class LARC:
    """Wrapper that scales every gradient by the ratio of the norms of weights and gradient, of which the host reads
    both, and adds the decay of the weights itself.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

    @torch.no_grad()
    def step(self) -> None:
        """Scale the gradients, then take a step of the optimizer."""
        groups = self.optim.param_groups
        decays = [group.get("weight_decay", 0) for group in groups]
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = 0
            for each in group["params"]:
                if each.grad is not None:
                    self._scale(each, decay, group["lr"])
        self.optim.step()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay

    def _scale(self, parameter: torch.Tensor, decay: float, rate: float) -> None:
        weights, gradient = torch.norm(parameter), torch.norm(parameter.grad)
        if weights != 0 and gradient != 0:
            ratio = self.trust_coefficient * weights / (gradient + weights * decay + self.eps)
            if self.clip:
                ratio = min(ratio / rate, 1)
            parameter.grad += decay * parameter
            parameter.grad *= ratio


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's group of ``group_size`` ranks in a row, for norms; None for all ranks."""
    gpus, own = dist.get_world_size(), dist.get_rank()
    if group_size in (0, gpus):
        return None
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, gpus, group_size)]
    return groups[own // group_size]


def multi_tensor_applier(kernel: Callable[..., Any], flag: Any, lists: Sequence[Any], *others: Any) -> Any:
    """Call a kernel over lists of tensors."""
    return kernel(2048 * 32, flag, lists, *others)


def _norms(chunk: int, flag: Any, lists: Any, per_tensor: Any = False, *_: Any) -> Any:
    found = torch._foreach_norm(lists[0])
    return found[0].new_empty(1, dtype=torch.float32), torch.stack(found) if per_tensor else None


def _scale(chunk: int, flag: Any, lists: Any, factor: Any, *_: Any) -> None:
    if lists[0] is lists[1] or lists[0][0].data_ptr() == lists[1][0].data_ptr():
        torch._foreach_mul_(lists[0], 1.0)
    else:
        torch._foreach_copy_(lists[1], lists[0])


def _axpby(chunk: int, flag: Any, lists: Any, *_: Any) -> None:
    first, second, result = lists
    if result is not first:
        torch._foreach_copy_(result, first)
    torch._foreach_add_(result, second)


def _unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor of the shapes of tensors."""
    parts = flat.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _flatten(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(-1) for each in parts])


def _flat_call(parts: Sequence[torch.Tensor], call: Callable[..., Any], more: Any = None) -> None:
    """Communicate tensors as one."""
    flat = _flatten(parts)
    call(flat, *(more or ()))
    for part, found in zip(parts, _unflatten(flat, parts), strict=True):
        part.copy_(found)


def _adam(chunk: int, flag: Any, lists: Any, *_: Any) -> None:
    gradients, parameters, first, second, *_others = lists
    torch._fused_adamw_(
        parameters, gradients, first, second, [], [], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients to a norm: a few kernels for all of them, whatever PyTorch's own function takes."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach=True)


_NORMALIZATION = {
    "FusedLayerNorm": FusedLayerNorm,
    "FusedRMSNorm": FusedRMSNorm,
    "MixedFusedLayerNorm": FusedLayerNorm,
    "MixedFusedRMSNorm": FusedRMSNorm,
}
_FUSED_NORM = {
    **_NORMALIZATION,
    "FusedLayerNormAffineFunction": SimpleNamespace(apply=_affine_norm),
    "fused_layer_norm_affine": _affine_norm,
}
_OPTIMIZERS = {
    each.__name__: each for each in (FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad)
}  # fmt: skip
_PARALLEL = {
    "DistributedDataParallel": data_parallel,
    "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
    "SyncBatchNorm": nn.SyncBatchNorm,
    "LARC": LARC,
    "create_syncbn_process_group": create_syncbn_process_group,
}
_AMP: dict[str, Any] = {
    "initialize": initialize,
    "scale_loss": scale_loss,
    "master_params": master_params,
    "state_dict": dict,
    "load_state_dict": lambda *_: None,
    "disable_casts": nullcontext,
    "_amp_state": _STATE,
    **{f"register_{kind}_function": lambda *_: None for kind in ("half", "float", "promote")},
    **{f"{kind}_function": _as_it_is for kind in ("half", "float", "promote")},
}

MODULES: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.amp": _AMP,
    "apex.amp._amp_state": {"_amp_state": _STATE},
    "apex.normalization": _NORMALIZATION,
    "apex.normalization.fused_layer_norm": _FUSED_NORM,
    "apex.optimizers": _OPTIMIZERS,
    "apex.parallel": _PARALLEL,
    "apex.parallel.distributed": {"DistributedDataParallel": data_parallel, "flat_dist_call": _flat_call},
    "apex.parallel.LARC": {"LARC": LARC},
    "apex.multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
    "apex.contrib": {},
    "apex.contrib.clip_grad": {"clip_grad_norm_": clip_grad_norm_},
    "amp_C": {
        "multi_tensor_l2norm": _norms,
        "multi_tensor_scale": _scale,
        "multi_tensor_axpby": _axpby,
        "multi_tensor_adam": _adam,
    },
    "apex_C": {"flatten": _flatten, "unflatten": _unflatten},
    "fused_weight_gradient_mlp_cuda": {
        f"wgrad_gemm_accum_{kind}": lambda given, gradient, sums: add_product(gradient.t(), given, sums)
        for kind in ("fp32", "fp16")
    },
}
