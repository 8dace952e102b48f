"""Engine of DeepSpeed (``deepspeed.initialize``) by its configuration: number type, accumulation, ZeRO stage, optimizer
and schedule. Pipelines, and parameters on the host, are refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from costmodel.base.errors import InputError, ModelError
from e2e.capture.distributed.world import resized
from e2e.capture.distributed.zero import HostAdam, ZeroOptimizer, ZeroSettings
from e2e.capture.distributed.zero_parameters import ZeroParameters
from e2e.capture.recorder import Recorder
from e2e.step.operator_trace import Phase

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32}
# Keys under ``zero_optimization`` whose effect is not modelled -> their values without effect.
_REFUSED: dict[str, object] = {
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
}
# Parts of a configuration that change the step and are not read.
_UNREAD = (
    "autotuning", "compression_training", "curriculum_learning", "data_efficiency", "eigenvalue", "hybrid_engine",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "tensor_parallel",
)  # fmt: skip


class FusedAdam(torch.optim.AdamW):
    """DeepSpeed's Adam: one kernel for all tensors, as PyTorch's fused form."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)


@dataclass(frozen=True)
class Configuration:
    """Configuration of an engine, read from its file or mapping. ``values``: as given."""

    values: Mapping[str, Any]
    zero: ZeroSettings
    micro_batch: int
    accumulation: int

    @property
    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self.micro_batch * self.accumulation * dist.get_world_size()


def read_configuration(given: Any) -> Configuration:
    """Read a configuration: a file, or its contents."""
    if given is None:
        raise InputError("deepspeed.initialize: without a configuration; give config=, or --deepspeed_config FILE")
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        if not path.is_file():
            raise InputError(f"{given}: no such configuration of DeepSpeed; check the path")
        given = json.loads(path.read_text(encoding="utf-8"))
    values: dict[str, Any] = getattr(given, "config", given)
    enabled = [kind for key, kind in _TYPES.items() if _part(values, key).get("enabled") is True]
    dtype = enabled[0] if enabled else torch.float32
    zero = _part(values, "zero_optimization")
    places = {key: _part(zero, key).get("device", "none") or "none" for key in ("offload_optimizer", "offload_param")}
    if places["offload_param"] != "none" or places["offload_optimizer"] not in ("none", "cpu"):
        key = "offload_param" if places["offload_param"] != "none" else "offload_optimizer"
        raise ModelError(f"DeepSpeed's {key} to {places[key]} is not modelled; set its device to none")
    for key, without_effect in _REFUSED.items():
        if zero.get(key) not in (None, without_effect):
            raise ModelError(f"DeepSpeed's {key} is not modelled; leave it out")
    stage = int(_number(zero, "stage", 0))
    prefix = "stage3_"
    settings = ZeroSettings(
        stage,
        dtype,
        _TYPES[values["communication_data_type"]] if values.get("communication_data_type") else dtype,
        float(_number(values, "gradient_clipping", 0.0)),
        int(_number(zero, "reduce_bucket_size", 5e8)),
        zero.get("reduce_scatter", True) is not False,
        _flag(zero, "overlap_comm", stage == 3),
        int(_number(zero, f"{prefix}prefetch_bucket_size", 5e7)),
        int(_number(zero, f"{prefix}param_persistence_threshold", 1e5)),
        int(_number(zero, f"{prefix}max_live_parameters", 1e9)),
        int(_number(zero, f"{prefix}max_reuse_distance", 1e9)),
        places["offload_optimizer"] == "cpu" and stage > 0,
    )
    return Configuration(values, settings, *_batch(values))


def unread_parts(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of a configuration that are switched on and change the step, but are not followed."""
    return tuple(key for key in _UNREAD if values.get(key) and _part(values, key).get("enabled") is not False)


def _part(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    found = values.get(key)
    return default if found is None or found == "auto" else float(found)


def _flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    found = values.get(key)
    return default if found is None or found == "auto" else bool(found)


def _batch(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return samples of a pass and passes of a step; two of DeepSpeed's three numbers give the third."""
    whole = int(_number(values, "train_batch_size", 0))
    micro = int(_number(values, "train_micro_batch_size_per_gpu", 0))
    passes = int(_number(values, "gradient_accumulation_steps", 0))
    ranks = dist.get_world_size()
    if whole and micro and not passes:
        passes = whole // (micro * ranks)
    passes = max(passes, 1)
    return micro or max(whole // (passes * ranks), 1), passes


def make_optimizer(given: Any, configuration: Configuration, parameters: Any) -> torch.optim.Optimizer | None:
    """Return the script's optimizer, or that of the configuration, or None."""
    if configuration.zero.on_host:
        return _on_host(given, configuration, parameters)
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        made: torch.optim.Optimizer = given(parameters)
        return made
    named = _part(configuration.values, "optimizer")
    if not named:
        return None
    kind = str(named.get("type", "")).lower()
    options = {key: value for key, value in _part(named, "params").items() if value != "auto"}
    of_pytorch, weight_decay_apart = options.pop("torch_adam", False), options.pop("adam_w_mode", True)
    decayed = torch.optim.AdamW if kind == "adamw" or weight_decay_apart else torch.optim.Adam
    adam = decayed if of_pytorch else FusedAdam
    plain: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": adam, "adamw": adam
    }  # fmt: skip
    if kind not in plain:
        raise ModelError(f"DeepSpeed's optimizer {named.get('type')} is not captured; use Adam, AdamW, SGD or Adagrad")
    return plain[kind](parameters, **options)


def _on_host(given: Any, configuration: Configuration, parameters: Any) -> torch.optim.Optimizer:
    """Return Adam on the host instead of an Adam given or named."""
    named = _part(configuration.values, "optimizer")
    kind = str(named.get("type", "")) if given is None else type(given).__name__
    if "adam" not in kind.lower():
        raise ModelError(
            f"DeepSpeed's offload of {kind or 'no optimizer'} is not modelled; only that of Adam and AdamW"
        )
    if isinstance(given, torch.optim.Optimizer):
        return HostAdam([{"params": group["params"], "lr": group["lr"]} for group in given.param_groups])
    return HostAdam(parameters, _number(_part(named, "params"), "lr", 1e-3))


class DeepSpeedEngine(torch.nn.Module):
    """Engine around a model: its passes, and its step at the end of an accumulation."""

    def __init__(
        self,
        model: torch.nn.Module,
        configuration: Configuration,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self.module = model
        self._configuration, zero = configuration, configuration.zero
        self.config = configuration.values
        self.basic_optimizer = optimizer
        self.zero: Any = None
        if zero.stage == 3:
            self.zero = ZeroParameters(model, optimizer, zero, resized(recorder), recorder)
        elif optimizer is not None:
            self.zero = ZeroOptimizer(optimizer, zero, recorder)
        if isinstance(optimizer, HostAdam):
            optimizer.recorder = recorder
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._boundary: bool | None = None
        autocast = _part(self.config, "torch_autocast")
        self._autocast = autocast.get("dtype", "bfloat16") if autocast.get("enabled") is True else None
        self.local_rank = torch.cuda.current_device()
        self.device = torch.device("cuda", self.local_rank)
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        dtype = getattr(torch, self._autocast) if self._autocast else None
        with torch.autocast("cuda", dtype=dtype) if dtype is not None else nullcontext():
            return self.module(*inputs, **named)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **more: Any) -> Any:
        """Run the backward pass of ``loss``; gradients are summed over the ranks as the stage says."""
        boundary = self.is_gradient_accumulation_boundary()
        if self.zero is not None:
            self.zero.begin_backward(boundary)
        if scale_wrt_gas and self._configuration.accumulation > 1:
            loss = loss / self._configuration.accumulation
        scaled = loss.float() * 65536.0 if self._configuration.zero.dtype is torch.float16 else loss
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if self.zero is not None:
            with self._in_phase("backward"):
                self.zero.end_backward(boundary)
        return loss

    @contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        before, self._recorder.phase = self._recorder.phase, phase
        try:
            yield
        finally:
            self._recorder.phase = before

    def step(self, lr_kwargs: Any = None) -> None:
        """Take a step of the optimizer if this is the last pass of an accumulation."""
        if self.is_gradient_accumulation_boundary():
            with self._in_phase("optimizer"):
                self.zero.step()
            if self.zero.plain:
                self.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
            else:
                self.zero.zero_grad()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.global_steps += 1
            self.global_samples += self._configuration.train_batch_size
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """True in the last pass of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._configuration.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether this is the last pass of a step, instead of counting."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of passes whose gradients stay on their rank."""
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def gradient_accumulation_steps(self) -> int:
        """Passes of a step."""
        return self._configuration.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a pass."""
        return self._configuration.micro_batch

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self._configuration.train_batch_size

    def zero_optimization_stage(self) -> int:
        """Stage of ZeRO."""
        return self._configuration.zero.stage

    def zero_optimization(self) -> bool:
        """True if anything is partitioned."""
        return self._configuration.zero.stage > 0

    def zero_optimization_partition_weights(self) -> bool:
        """True if parameters are partitioned."""
        return self._configuration.zero.stage == 3

    def fp16_enabled(self) -> bool:
        """True in float16."""
        return self._configuration.zero.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """True in bfloat16."""
        return self._configuration.zero.dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """Largest norm of gradients, or 0."""
        return self._configuration.zero.clipping

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step."""
        return None if self.zero is None else self.zero.norm  # type: ignore[no-any-return]

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Save nothing."""
        return True

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """Save nothing."""
        return True

    def load_checkpoint(self, load_dir: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Load nothing: a checkpoint changes values only."""
        return load_dir, {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_modules"]["module"], name)


def initialize(
    recorder: Recorder,
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Any = None,
    config: Any = None,
    config_params: Any = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return engine, optimizer, loader of ``training_data`` and schedule, as ``deepspeed.initialize`` does."""
    if model is None:
        raise InputError("deepspeed.initialize: without a model")
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    given = config if config is not None else config_params
    configuration = read_configuration(given if given is not None else getattr(args, "deepspeed_config", None))
    model.to(device="cuda", dtype=configuration.zero.dtype if configuration.zero.dtype is not torch.float32 else None)
    parameters: Iterable[Any] = (each for each in model.parameters() if each.requires_grad)
    if model_parameters is not None:
        parameters = model_parameters
    made = make_optimizer(optimizer, configuration, list(parameters))
    scheduler = lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler
    if scheduler is None and made is not None and _part(configuration.values, "scheduler"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)
    engine = DeepSpeedEngine(model, configuration, made, scheduler, recorder)
    loader = None
    if training_data is not None:
        loader = torch.utils.data.DataLoader(
            training_data,
            configuration.micro_batch,
            sampler=torch.utils.data.DistributedSampler(training_data),
            collate_fn=collate_fn,
        )
    return engine, made, loader, scheduler
