"""Stage 3 of DeepSpeed's ZeRO: parameters in parts, gathered around the modules that use them.

After the first backward pass the order of modules is known: the parameters of the next ones are gathered ahead, up to
``prefetch_bucket_size`` elements at each module, and those that are used again within ``max_reuse_distance`` elements
stay. Parameters below ``param_persistence_threshold`` elements are gathered once after each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from e2e.capture.distributed.zero import (
    HostGradients,
    ZeroSettings,
    copy_over,
    gather,
    scale_on_host,
    scatter_sums,
    total_norm,
)
from e2e.capture.recorder import Recorder

Resized = Callable[[torch.Tensor, int], None]

# Python functions that DeepSpeed's hooks call (:mod:`e2e.capture.python_calls`): at each pass of each module (forward,
# recomputed or backward), at each gradient, and around each linear layer. Counted in DeepSpeed 0.19 with Llama's layers
# on two CPU ranks. DeepSpeed took 4.3 to 5.0 ms of CPU time more than the model alone for each checkpointed layer;
# these counts, at 0.1 us a function, give 4.8 ms.
_OF_MODULE, _OF_GRADIENT, _OF_LINEAR = 1_065, 344, 259


class ZeroParamStatus(Enum):
    """State of a parameter as a whole, ``ds_status``, which libraries read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def stream_of(settings: ZeroSettings) -> torch.cuda.Stream:
    """Return the stream of collectives: without ``overlap_comm`` nothing runs beside them."""
    return torch.cuda.Stream() if settings.overlap_comm else torch.cuda.current_stream()


class PartedParameter:
    """Parameter of which each rank keeps a part; its memory as a whole comes and goes."""

    def __init__(self, parameter: torch.nn.Parameter, settings: ZeroSettings, resize: Resized) -> None:
        self.parameter, self.count = parameter, parameter.numel()
        self.length = math.ceil(self.count / dist.get_world_size())
        self.part = torch.empty(self.length, dtype=parameter.dtype, device=parameter.device)
        self.whole = torch.empty(self.length * dist.get_world_size(), dtype=parameter.dtype, device=parameter.device)
        parameter.data = self.whole.narrow(0, 0, self.count).view_as(parameter)
        self.persistent = self.count <= settings.param_persistence_threshold
        self.available = True
        parameter.ds_parted, parameter.ds_status = self, ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        self.gradient: torch.Tensor | None = None
        self._resize = resize

    def fill(self) -> torch.Tensor:
        """Return the memory of the whole, which is allocated."""
        if not self.available:
            self._resize(self.whole, self.whole.numel() * self.whole.element_size())
            self.available = True
            self.parameter.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        return self.whole

    def release(self) -> None:
        """Free the memory of the whole."""
        if self.available and not self.persistent:
            self._resize(self.whole, 0)
            self.available = False
            self.parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which a program uses the whole parameter itself."""
        missing = not self.available
        if missing:
            gather(self.fill(), self.part)
        yield
        if missing:
            self.release()


class Gatherer:
    """Gathers the parameters of modules before they are used, and frees them after."""

    def __init__(self, settings: ZeroSettings, parted: dict[int, PartedParameter]) -> None:
        self._settings, self._parted = settings, parted
        self._stream = stream_of(settings)
        # Modules in the order in which they use their parameters, of the first pass; and the place in later ones.
        self._order: list[torch.nn.Module] = []
        self._known = False
        self._place = 0
        self._ahead = 0
        self._kept: list[frozenset[int]] = []

    def of(self, module: torch.nn.Module) -> list[PartedParameter]:
        """Return the parameters that belong to ``module`` itself."""
        return [self._parted[id(each)] for each in module._parameters.values() if id(each) in self._parted]

    def fetch(self, module: torch.nn.Module) -> None:
        """Gather the parameters of ``module``, and of the next ones if they are known."""
        wanted = self.of(module)
        self.gather(wanted)
        torch.cuda.current_stream().wait_stream(self._stream)
        if not self._known:
            self._order.append(module)
            return
        self._place += 1
        self._ahead = max(self._ahead, self._place)
        live = sum(each.count for each in self._parted.values() if each.available)
        most = min(self._settings.max_live_parameters - live, self._settings.prefetch_bucket_size)
        following: dict[int, PartedParameter] = {}
        while self._ahead < len(self._order) and sum(each.count for each in following.values()) < most:
            missing = [each for each in self.of(self._order[self._ahead]) if not each.available]
            following.update((id(each), each) for each in missing)
            self._ahead += 1
        self.gather(following.values())

    def gather(self, parameters: Iterable[PartedParameter]) -> None:
        """Gather those of ``parameters`` that are not there: one by itself, several at once."""
        missing = [each for each in parameters if not each.available]
        if not missing:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if len(missing) == 1:
                gather(missing[0].fill(), missing[0].part)
                return
            ranks, size = dist.get_world_size(), sum(each.length for each in missing)
            flat = torch.empty(size * ranks, dtype=missing[0].part.dtype, device=missing[0].part.device)
            own = flat.narrow(0, dist.get_rank() * size, size)
            torch.cat([each.part for each in missing], out=own)
            gather(flat, own)
            rows, place = flat.view(ranks, size), 0
            for each in missing:
                torch.cat([*rows.narrow(1, place, each.length)], out=each.fill())
                place += each.length

    def release(self, module: torch.nn.Module) -> None:
        """Free the parameters of ``module`` that are not used again soon."""
        kept = self._kept[self._place - 1] if self._known and 0 < self._place <= len(self._kept) else frozenset()
        for each in self.of(module):
            if id(each) not in kept:
                each.release()

    def end_pass(self) -> None:
        """Finish a backward pass."""
        if not self._known and self._order:
            self._known = True
            self._kept = [self._used_again(place) for place in range(len(self._order))]
        self._place = self._ahead = 0
        self.release_all()

    def release_all(self) -> None:
        """Free all parameters but the persistent ones."""
        for each in self._parted.values():
            each.release()

    def _used_again(self, place: int) -> frozenset[int]:
        """Return the parameters of the module at ``place`` that are used again within the largest distance."""
        own = {id(each) for each in self.of(self._order[place])}
        found: set[int] = set()
        traversed = 0
        for module in self._order[place + 1 :]:
            if traversed >= self._settings.max_reuse_distance or found == own:
                break
            for each in self.of(module):
                found |= {id(each)} & own
                traversed += each.count
        return frozenset(found)


class ZeroParameters:
    """Optimizer of stage 3 around the script's, whose parameters become the parts in float32."""

    plain = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        settings: ZeroSettings,
        resize: Resized,
        recorder: Recorder,
    ) -> None:
        self.optimizer, self.settings, self._recorder = optimizer, settings, recorder
        self._host = HostGradients(recorder) if settings.on_host else None
        self.norm: float | None = None
        self.parted = {id(each): PartedParameter(each, settings, resize) for each in module.parameters()}
        self.gatherer = Gatherer(settings, self.parted)
        self.groups: list[tuple[list[PartedParameter], torch.Tensor, torch.nn.Parameter]] = []
        for group in optimizer.param_groups if optimizer is not None else ():
            self._divide(group)
        self._bucket: list[PartedParameter] = []
        self._filled = 0
        self._stream = stream_of(settings)
        for part in module.modules():
            self._count(part)
            if self.gatherer.of(part):
                self._watch(part)
        for each in self.parted.values():
            if each.parameter.requires_grad:
                each.parameter.register_post_accumulate_grad_hook(self._reduce)
        self.gatherer.release_all()

    def _divide(self, group: dict[str, Any]) -> None:
        """Lay the parts of a group's parameters into a flat tensor, with a copy in float32 that the optimizer gets."""
        held = [self.parted[id(each)] for each in group["params"] if each.requires_grad]
        flat = torch.empty(sum(each.length for each in held), dtype=held[0].part.dtype, device=held[0].part.device)
        place = 0
        for each in held:
            each.part = flat.narrow(0, place, each.length)
            place += each.length
        on_host = torch.empty(flat.shape, dtype=torch.float32, device="cpu") if self.settings.on_host else None
        master = torch.nn.Parameter(flat.clone().float() if on_host is None else on_host)
        self.groups.append((held, flat, master))
        group["params"] = [master]

    def _watch(self, module: torch.nn.Module) -> None:
        """Fetch the parameters of ``module`` before its passes and release them after."""
        gatherer = self.gatherer

        def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not computed again inside a backward pass
                gatherer.release(module)
            _before_backward(output, lambda: gatherer.fetch(module))

        module.register_forward_pre_hook(lambda module, inputs: gatherer.fetch(module))
        module.register_forward_hook(leave)
        own = [each for each in module._parameters.values() if each is not None and each.requires_grad]
        if own:
            own[-1].register_post_accumulate_grad_hook(lambda parameter: gatherer.release(module))

    def _count(self, module: torch.nn.Module) -> None:
        """Count the functions of hooks around the passes of ``module``: those here stand for them and do not count."""
        count = self._recorder.add_functions
        functions = _OF_MODULE + (_OF_LINEAR if isinstance(module, torch.nn.Linear) else 0)

        def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            _before_backward(output, lambda: count(_OF_MODULE))

        module.register_forward_pre_hook(lambda module, inputs: count(functions))
        module.register_forward_hook(leave)

    def begin_backward(self, boundary: bool) -> None:
        """Prepare a backward pass."""

    def _reduce(self, parameter: torch.nn.Parameter) -> None:
        self._recorder.add_functions(_OF_GRADIENT)
        parted = self.parted[id(parameter)]
        if self._filled + parted.count > self.settings.reduce_bucket_size:
            self._scatter()
        if not self._bucket:
            count = min(self.settings.reduce_bucket_size, sum(each.count for each in self.parted.values()))
            self._buffer = torch.empty(count, dtype=parameter.dtype, device=parameter.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._filled + parted.count <= self._buffer.numel():
            assert parameter.grad is not None
            with torch.cuda.stream(self._stream):
                place = self._buffer.narrow(0, self._filled, parted.count).view_as(parameter)
                place.copy_(parameter.grad)
                parameter.grad.data = place
        self._bucket.append(parted)
        self._filled += parted.count

    def _scatter(self) -> None:
        """Sum the gradients in the bucket over the ranks; each keeps its parts."""
        if not self._bucket:
            return
        ranks, rank = dist.get_world_size(), dist.get_rank()
        with torch.cuda.stream(self._stream):
            gradients = [each.parameter.grad.to(self.settings.communicated) for each in self._bucket]  # type: ignore[union-attr]
            if len(gradients) == 1 and gradients[0].numel() % ranks == 0:
                flat = gradients[0].view(-1)
            else:
                pieces: list[torch.Tensor] = []
                rows = [gradient.view(-1).split(each.length) for gradient, each in self._pairs(gradients)]
                for number in range(ranks):
                    for row, each in zip(rows, self._bucket, strict=True):
                        piece = row[number] if number < len(row) else row[0][:0]
                        pieces.append(piece)
                        if piece.numel() < each.length:
                            pieces.append(piece.new_empty(each.length - piece.numel()))
                flat = torch.cat(pieces)
            flat.div_(ranks)
            own = flat.view(ranks, -1)[rank]
            scatter_sums(own, flat)
            place = 0
            for each in self._bucket:
                piece = own.narrow(0, place, each.length)
                if self._host is not None:
                    self._host.keep(each, piece)
                elif each.gradient is None:
                    each.gradient = piece.clone()
                else:
                    each.gradient.add_(piece)
                each.parameter.grad = None
                place += each.length
        self._bucket, self._filled = [], 0

    def _pairs(self, gradients: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, PartedParameter]]:
        return zip(gradients, self._bucket, strict=True)

    def end_backward(self, boundary: bool) -> None:
        """Finish a backward pass."""
        self._scatter()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._buffer = torch.empty(0)
        self.gatherer.end_pass()

    def step(self) -> None:
        """Run the optimizer on the parts, and gather the persistent parameters."""
        assert self.optimizer is not None
        if self._host is not None:
            self._update_on_host(self._host)
        else:
            self._update()
        works = [gather(each.whole, each.part, async_op=True) for each in self.parted.values() if each.persistent]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def _update_on_host(self, host: HostGradients) -> None:
        """Run the optimizer on the host, where the result is cast, and copy it to the GPU."""

        def scale(norms: Sequence[torch.Tensor]) -> float | None:
            self.norm = total_norm(norms, self.settings)
            return self.norm if self.settings.dtype is torch.float16 or self.settings.clipping > 0 else None

        masters = [master.detach() for _, _, master in self.groups]
        scale_on_host(self._recorder, self.settings, host, masters, scale)
        self.optimizer.step()  # type: ignore[union-attr]
        for (_, flat, _), master in zip(self.groups, masters, strict=True):
            narrow = torch.empty(flat.shape, dtype=flat.dtype, device="cpu")
            self._recorder.record_call("aten::_to_copy", (master,), (narrow,), {})
            copy_over(self._recorder, flat, narrow)

    def _update(self) -> None:
        """Run the optimizer on the parts."""
        held = [each for group, _, _ in self.groups for each in group if each.gradient is not None]
        self.norm = total_norm([each.gradient for each in held if each.gradient is not None], self.settings)
        scaled = self.settings.dtype is torch.float16 or self.settings.clipping > 0
        for group, _, master in self.groups:
            pieces = [each.part.new_zeros(each.length) if each.gradient is None else each.gradient for each in group]
            master.grad = torch.cat(pieces).float()
            for each in group:
                each.gradient = None
            if scaled:
                master.grad.mul_(1.0 / max(self.norm, 1.0))
        self.optimizer.step()  # type: ignore[union-attr]
        for _, flat, master in self.groups:
            master.grad = None
            flat.copy_(master.detach())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients of the model."""
        for each in self.parted.values():
            each.parameter.grad = None


def _before_backward(output: Any, act: Callable[[], None]) -> None:
    """Let ``act`` run before the backward pass of a module with this ``output``, if it has one."""
    first = next(iter(_tensors(output)), None)
    if first is not None and first.requires_grad and torch.is_grad_enabled():
        first.register_hook(lambda gradient: act())


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
