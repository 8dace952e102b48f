"""Optimizers of DeepSpeed's ZeRO stages, by the kernels and collectives that they launch (its runtime/zero folder).

Parameters of a group lie in one flat tensor of the model's type; each rank updates its part of a copy in float32.
Stage 0: every rank updates everything. Stage 1: gradients are summed over the ranks after the last backward pass of a
step, and each rank updates its part, which all gather. Stage 2: the same, summed during every backward pass and kept in
parts. Stage 3: parameters are in parts too: gathered before a module runs, forward and backward, and ahead of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from e2e.capture.recorder import Recorder
from e2e.step.operator_trace import CPU_ADAM

# By their names before and since PyTorch 2.13.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sums = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Elements to which a flat tensor is filled up, for each rank.
_ALIGNED = 2


@dataclass(frozen=True)
class ZeroSettings:
    """Settings under ``zero_optimization`` and of gradients, with DeepSpeed's defaults."""

    stage: int = 0
    dtype: torch.dtype = torch.float32
    # Number type of gradients on their way between ranks.
    communicated: torch.dtype = torch.float32
    clipping: float = 0.0
    reduce_bucket_size: int = 500_000_000
    reduce_scatter: bool = True
    overlap_comm: bool = False
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    # True if the optimizer is on the host, with its state and the gradients of its parts.
    on_host: bool = False


class HostGradients:
    """Parts of gradients in the host's memory, in float32, by their owners."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held: dict[int, torch.Tensor] = {}
        # Norms of the parts, computed on the GPU.
        self.norms: dict[int, torch.Tensor] = {}

    def keep(self, owner: object, part: torch.Tensor) -> None:
        """Copy ``part`` to the host, added to what is there, by way of the GPU."""
        part = part.float()
        held = self._held.get(id(owner))
        if held is None:
            held = self._held[id(owner)] = torch.empty(part.shape, dtype=torch.float32, device="cpu")
        else:
            earlier = torch.empty_like(part)
            copy_over(self._recorder, earlier, held)
            part = part + earlier
        self.norms[id(owner)] = torch.linalg.vector_norm(part)
        copy_over(self._recorder, held, part)

    def clear(self) -> None:
        """Forget the gradients."""
        self._held.clear()
        self.norms.clear()


def copy_over(recorder: Recorder, target: torch.Tensor, source: torch.Tensor) -> None:
    """Record a copy between the host and the GPU, without touching the host's memory."""
    recorder.record_call("aten::copy_", (target, source, True), (target,), {})


class HostAdam(torch.optim.Optimizer):
    """DeepSpeed's Adam on the host, of which calls are recorded and nothing is computed."""

    def __init__(self, params: Any, lr: float = 1e-3, **others: Any) -> None:
        super().__init__(params, {"lr": lr, **others})
        self.recorder: Recorder | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Record one call for each parameter."""
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state.update((name, torch.empty_like(each)) for name in ("gradient", "exp_avg", "exp_avg_sq"))
                assert self.recorder is not None
                self.recorder.record_call(CPU_ADAM, (each, *state.values()), (), {})


class FlatGroup:
    """Parameters of one group of the optimizer in a flat tensor, and the part that this rank updates."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], partitioned: bool, host: HostGradients | None = None
    ) -> None:
        self.host = host
        self.parameters = [each for each in parameters if each.requires_grad]
        ranks = dist.get_world_size() if partitioned else 1
        rank = dist.get_rank() if partitioned else 0
        count = sum(each.numel() for each in self.parameters)
        self.size = math.ceil(count / (ranks * _ALIGNED)) * _ALIGNED
        first = self.parameters[0]
        self.flat = torch.empty(self.size * ranks, dtype=first.dtype, device=first.device)
        self.begin, self.end = rank * self.size, (rank + 1) * self.size
        self.places: dict[int, int] = {}
        place = 0
        for each in self.parameters:
            self.places[id(each)] = place
            each.data = self.flat.narrow(0, place, each.numel()).view_as(each)
            place += each.numel()
        self.part = self.flat.narrow(0, self.begin, self.size)
        if host is None:
            self.master = torch.nn.Parameter(self.part.detach().clone().float())
        else:
            self.master = torch.nn.Parameter(torch.empty(self.size, dtype=torch.float32, device="cpu"))
        # Parts of gradients of this rank, in the order of parameters.
        self.gradients: dict[int, torch.Tensor] = {}

    def own(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """Return where the part of this rank begins in ``parameter``, and its length, which may be 0."""
        place = self.places[id(parameter)]
        begin, end = max(self.begin, place), min(self.end, place + parameter.numel())
        return begin - place, max(end - begin, 0)

    def keep(self, parameter: torch.nn.Parameter, part: torch.Tensor) -> None:
        """Keep the part of a gradient, or add it to that of an earlier backward pass."""
        if self.host is not None:
            self.host.keep(parameter, part)
        elif id(parameter) in self.gradients:
            self.gradients[id(parameter)].add_(part)
        else:
            self.gradients[id(parameter)] = part.clone()

    def load_gradient(self, scale: torch.Tensor | float | None) -> None:
        """Set the gradient of the part in float32 from the parts of gradients."""
        pieces = [self.gradients[id(each)] for each in self.parameters if id(each) in self.gradients]
        missing = self.size - sum(piece.numel() for piece in pieces)
        if missing > 0 or not pieces:
            pieces.append(self.flat.new_zeros(missing))
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        self.gradients.clear()
        self.master.grad = flat.float()
        if scale is not None:
            self.master.grad.mul_(scale)


@dataclass
class Bucket:
    """Gradients on their way to the ranks that own them: copied into a flat buffer, summed when it is full."""

    settings: ZeroSettings
    buffer: torch.Tensor
    filled: int = 0
    waiting: list[tuple[FlatGroup, torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)

    def add(self, group: FlatGroup, parameter: torch.nn.Parameter, stream: Any) -> None:
        """Add the gradient of ``parameter``, which is freed."""
        assert parameter.grad is not None
        gradient, count = parameter.grad, parameter.numel()
        if self.filled + count > self.settings.reduce_bucket_size:
            self.reduce(stream)
        if count <= self.settings.reduce_bucket_size:
            place = self.buffer.narrow(0, self.filled, count)
            place.copy_(gradient.view(-1))
            self.filled += count
        else:
            place = gradient.view(-1)
        self.waiting.append((group, parameter, place))
        parameter.grad = None

    def reduce(self, stream: Any) -> None:
        """Sum what is in the bucket over the ranks; the parts of this rank go to its gradients."""
        if not self.waiting:
            return
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if self.settings.reduce_scatter:
                flat = torch.cat([place for _, _, place in self.waiting])
            else:
                flat = self.buffer.narrow(0, 0, self.filled)
            flat = average(flat, self.settings.communicated)
            place = 0
            for group, parameter, _ in self.waiting:
                begin, length = group.own(parameter)
                if length:
                    group.keep(parameter, flat.narrow(0, place + begin, length))
                place += parameter.numel()
        self.filled = 0
        self.waiting.clear()


def average(flat: torch.Tensor, communicated: torch.dtype) -> torch.Tensor:
    """Average gradients over all ranks, in the number type ``communicated``."""
    sent = flat.to(communicated)
    sent.div_(dist.get_world_size())
    dist.all_reduce(sent)
    if sent is not flat:
        flat.copy_(sent)
    return flat


class ZeroOptimizer:
    """Optimizer of stages 0 to 2 around the script's, whose parameters become the parts in float32."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: ZeroSettings, recorder: Recorder) -> None:
        self.optimizer, self.settings, self._recorder = optimizer, settings, recorder
        self._host = HostGradients(recorder) if settings.on_host else None
        self.norm: float | None = None
        self.groups: list[FlatGroup] = []
        partitioned = settings.stage > 0
        # As it is, without copies: plain data parallelism.
        self.plain = not partitioned and settings.dtype is torch.float32
        if self.plain:
            return
        for group in optimizer.param_groups:
            flat = FlatGroup(group["params"], partitioned, self._host)
            self.groups.append(flat)
            group["params"] = [flat.master]
        self._stream = torch.cuda.Stream() if settings.overlap_comm else None
        self._bucket: Bucket | None = None
        if settings.stage == 2 or (settings.stage == 1 and settings.overlap_comm):
            for flat in self.groups:
                for parameter in flat.parameters:
                    parameter.register_post_accumulate_grad_hook(_hook(self, flat))

    def begin_backward(self, boundary: bool) -> None:
        """Prepare a backward pass; ``boundary``: it is the last one of a step."""
        self.reducing = self.settings.stage == 2 or boundary
        if not self.plain and self.settings.stage > 0 and self.reducing:
            count = min(self.settings.reduce_bucket_size, sum(each.flat.numel() for each in self.groups))
            flat = self.groups[0].flat
            self._bucket = Bucket(self.settings, torch.empty(count, dtype=flat.dtype, device=flat.device))

    def reduce(self, group: FlatGroup, parameter: torch.nn.Parameter) -> None:
        """Take the gradient of ``parameter``, which is complete."""
        if self._bucket is not None and parameter.grad is not None:
            self._bucket.add(group, parameter, self._stream)

    def end_backward(self, boundary: bool) -> None:
        """Finish a backward pass."""
        if not dist.get_world_size() > 1 and self.settings.stage == 0:
            return
        if self.settings.stage == 0:
            if boundary:
                self._reduce_all()
            return
        if self._bucket is None:
            return
        for group in self.groups:
            for parameter in group.parameters:
                self.reduce(group, parameter)
        self._bucket.reduce(self._stream)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._bucket = None

    def _reduce_all(self) -> None:
        """Average all gradients over the ranks, in buckets."""
        owners = (group["params"] for group in self.optimizer.param_groups)
        parameters = [each for held in owners for each in held] if self.plain else self._all()
        for bucket in in_buckets([each for each in parameters if each.grad is not None], 500_000_000):
            gradients = [each.grad for each in bucket]
            flat = average(torch.cat([each.reshape(-1) for each in gradients]), self.settings.communicated)
            for gradient, synchronised in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(synchronised.view_as(gradient))

    def _all(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def step(self) -> None:
        """Run the optimizer on the parts, and gather what the ranks have updated."""
        settings = self.settings
        if self.plain:
            if settings.clipping:
                owners = (group["params"] for group in self.optimizer.param_groups)
                torch.nn.utils.clip_grad_norm_([each for held in owners for each in held], settings.clipping)
            self.optimizer.step()
            return
        if settings.stage == 0:
            for group in self.groups:
                for parameter in group.parameters:
                    if parameter.grad is not None:
                        group.gradients[id(parameter)] = parameter.grad
                        parameter.grad = None
        if self._host is not None:
            self._step_on_host(self._host)
            return
        scale = self._scale([part for group in self.groups for part in group.gradients.values()])
        for group in self.groups:
            group.load_gradient(scale)
        self.optimizer.step()
        for group in self.groups:
            group.master.grad = None
            if settings.stage == 0:
                for parameter in group.parameters:
                    place = group.master.detach().narrow(0, group.places[id(parameter)], parameter.numel())
                    parameter.data.copy_(place.view_as(parameter))
                continue
            group.part.copy_(group.master.detach())
            gather(group.flat, group.part)

    def _step_on_host(self, host: HostGradients) -> None:
        """Run the optimizer on the host, and copy what it has updated to the GPU, where it is cast and gathered."""
        scale_on_host(self._recorder, self.settings, host, [group.master for group in self.groups], self._scale)
        self.optimizer.step()
        for group in self.groups:
            updated = torch.empty(group.size, dtype=torch.float32, device=group.flat.device)
            copy_over(self._recorder, updated, group.master.detach())
            group.part.copy_(updated)
            gather(group.flat, group.part)

    def _scale(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | float | None:
        """Return what gradients are multiplied by: for the loss scale and the largest norm."""
        self.norm = total_norm(parts, self.settings)
        if self.settings.dtype is torch.float16 or self.settings.clipping:
            return 1.0 / max(self.norm, 1.0)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients of the model."""
        for parameter in self._all():
            parameter.grad = None


def scale_on_host(
    recorder: Recorder,
    settings: ZeroSettings,
    host: HostGradients,
    masters: Sequence[torch.Tensor],
    scale: Callable[[Sequence[torch.Tensor]], Any],
) -> None:
    """Scale the gradients of ``masters`` on the host if they are clipped or scaled, once their norm is known."""
    found = scale(list(host.norms.values()))
    host.clear()
    for master in masters if found is not None else ():
        recorder.record_call("aten::mul_", (master.detach(), 1.0), (master.detach(),), {})


def _hook(optimizer: ZeroOptimizer, group: FlatGroup) -> Any:
    def reduce(parameter: torch.nn.Parameter) -> None:
        if optimizer.reducing:
            optimizer.reduce(group, parameter)

    return reduce


def in_buckets(parameters: Iterable[torch.nn.Parameter], most: int) -> Iterable[list[torch.nn.Parameter]]:
    """Yield ``parameters`` in lists of more than ``most`` elements, but for the last one."""
    bucket: list[torch.nn.Parameter] = []
    count = 0
    for parameter in parameters:
        bucket.append(parameter)
        count += parameter.numel()
        if count > most:
            yield bucket
            bucket, count = [], 0
    if bucket:
        yield bucket


def total_norm(parts: Sequence[torch.Tensor], settings: ZeroSettings) -> float:
    """Return the norm of the gradients of all ranks, which the host reads; for float16 overflows are looked for."""
    if settings.dtype is torch.float16:
        found = torch.stack([_overflow(part) for part in parts]).max()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        found.item()
    norms = [torch.linalg.vector_norm(part.float()) for part in parts]
    total = torch.stack(norms).pow(2).sum()
    if settings.stage > 0:
        dist.all_reduce(total)
    return float(total.pow(0.5).item())


def _overflow(part: torch.Tensor) -> torch.Tensor:
    numbers = part.float()
    return numbers.isnan().logical_or(numbers.isinf()).float().max()
