"""Recorder of every operator below autograd, with the enclosing calls: functions of the script, nodes of autograd; and
with the ranges named by the script.

Calls nest as in the traces of the PyTorch profiler: ``aten::linear`` around ``aten::addmm``;
``autograd::engine::evaluate_function: AddmmBackward0`` around ``AddmmBackward0`` around ``aten::mm``.

Ranges (``record_function``, NVTX) cost nothing here, as without a profiler: only the step itself is predicted.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import get_worker_info

from costmodel.base.errors import ModelError
from e2e.capture.call_records import Converter, as_on_gpu, is_wrapper
from e2e.capture.custom_operators import CustomOperators
from e2e.capture.environment import DEFAULT_STREAM, StreamState, ignore_call
from e2e.capture.known_values import follow, known
from e2e.capture.meta_results import ASSUMED, EVEN_COUNTS, SELECTIONS, KnownResults, is_assumed
from e2e.capture.possible_values import note
from e2e.capture.python_calls import Uncounted
from e2e.capture.regions import CompiledFunction, Regions
from e2e.capture.script_errors import MOST_CALLED, MOST_CALLS, MOST_FLAGS, MOST_PASSES, EndlessStepError, NotYetSent
from e2e.capture.script_lines import script_line
from e2e.step.operator_trace import (
    NUMBERS,
    RECOMPUTED,
    RETURNED,
    NamedRange,
    NamedRanges,
    OperatorCall,
    Phase,
    RepeatedPass,
    Value,
    is_named_by_script,
)


@dataclass
class ScriptRanges:
    """Ranges of one recorded step. A range is closed by the ``handle`` that opened it, whatever was opened since."""

    _entered: dict[int, NamedRange] = field(default_factory=dict)
    _open: list[tuple[object, int]] = field(default_factory=list)
    _in_backward: set[int] = field(default_factory=set)
    # Autograd's counter at each change of the innermost range, and the new innermost range.
    _counts: list[int] = field(default_factory=list)
    _since: list[int | None] = field(default_factory=list)
    _of_call: dict[int, int] = field(default_factory=dict)
    _of_forward: dict[int, int] = field(default_factory=dict)

    def enter(self, handle: object, name: str) -> None:
        """Begin a range called ``name``."""
        number = len(self._entered)
        self._entered[number] = NamedRange(number, name, self.innermost)
        self._open.append((handle, number))
        if torch._C._current_graph_task_id() != -1:
            self._in_backward.add(number)
        self._changed()

    @property
    def innermost(self) -> int | None:
        """Innermost open range, or None."""
        return self._open[-1][1] if self._open else None

    @property
    def around_backward(self) -> int | None:
        """Innermost open range entered outside the backward pass, or None."""
        return next((entry for _, entry in reversed(self._open) if entry not in self._in_backward), None)

    def place(self, call: int, entry: int | None) -> None:
        """Assign the enclosing ``call``, noted only now, to ``entry``."""
        self._of_call.pop(call, None)
        if entry is not None:
            self._of_call[call] = entry

    def forget(self, begin: int) -> None:
        """Forget the calls from ``begin`` on."""
        for table in (self._of_call, self._of_forward):
            for call in [call for call in table if call >= begin]:
                del table[call]

    def leave(self, handle: object) -> None:
        """End the range entered with ``handle``, if it was entered here."""
        for place in reversed(range(len(self._open))):
            if self._open[place][0] is handle:
                del self._open[place]
                self._changed()
                return

    def leave_last(self) -> None:
        """End the innermost range without a handle, as NVTX pops them."""
        last = next((handle for handle, _ in reversed(self._open) if isinstance(handle, _Pushed)), None)
        if last is not None:
            self.leave(last)

    def note(self, call: int, node: int | None) -> None:
        """Assign the new ``call`` to the open ranges; ``node``: number of the autograd node that runs it, in a backward
        pass.
        """
        self.place(call, self.innermost)
        if node is not None:
            place = bisect_right(self._counts, node) - 1
            entry = self._since[place] if place >= 0 else None
            if entry is not None:
                self._of_forward[call] = entry

    def found(self) -> NamedRanges:
        """Return the ranges with at least one call."""
        used: dict[int, NamedRange] = {}
        for entry in {*self._of_call.values(), *self._of_forward.values()}:
            at: int | None = entry
            while at is not None and at not in used:
                used[at] = self._entered[at]
                at = used[at].parent
        return NamedRanges({number: used[number] for number in sorted(used)}, self._of_call, self._of_forward)

    def _changed(self) -> None:
        self._counts.append(torch._C._autograd._get_sequence_nr())
        self._since.append(self.innermost)


class _Pushed:
    """Handle for a range of NVTX, which has none."""


class RangeKeeper(Protocol):
    """Recorder of calls and ranges, active while ``enabled``."""

    enabled: bool
    ranges: ScriptRanges


@contextmanager
def heard(recorder: RangeKeeper) -> Iterator[None]:
    """Context in which the ``ranges`` of ``recorder`` follow the ranges that a script enters and leaves while it is
    enabled.
    """
    mark = torch.autograd.profiler.record_function
    enter, leave = mark.__enter__, mark.__exit__

    def entered(self: Any) -> Any:
        if recorder.enabled and is_named_by_script(self.name):
            recorder.ranges.enter(self, self.name)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        recorder.ranges.leave(self)
        return leave(self, *error)

    def pushed(name: str, *rest: Any, **options: Any) -> int:
        if recorder.enabled:
            recorder.ranges.enter(_Pushed(), str(name))
        return 0

    def popped() -> int:
        if recorder.enabled:
            recorder.ranges.leave_last()
        return 0

    with ExitStack() as stack:
        stack.enter_context(patch.object(mark, "__enter__", entered))
        stack.enter_context(patch.object(mark, "__exit__", left))
        stack.enter_context(patch.object(torch.cuda.nvtx, "range_push", pushed))
        stack.enter_context(patch.object(torch.cuda.nvtx, "range_pop", popped))
        yield


MAIN_THREAD = 0
AUTOGRAD_THREAD = 1
NO_SEQUENCE = 2**64 - 1
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
_DETACH = torch.ops.aten.detach.default
_CLONE = torch.ops.aten.clone.default
_ADD = torch.ops.aten.add.Tensor
_READ = torch.ops.aten._local_scalar_dense.default


class _Frame:
    """Enclosing call. It becomes a record only when something is recorded inside it."""

    __slots__ = ("args", "entry", "id", "kwargs", "name", "result")

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], entry: int | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.entry = entry  # range of the script in which it began
        self.id: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """Calls of a step, with their ranges, passes, compiled regions and CUDA graphs (:class:`OperatorTrace`)."""

    calls: tuple[OperatorCall, ...] = ()
    ranges: NamedRanges = NamedRanges()
    passes: tuple[frozenset[int], ...] = ()
    regions: Mapping[int, int] = field(default_factory=dict)
    graphs: Mapping[int, int] = field(default_factory=dict)
    # Pass that stands for equal ones that were left out.
    repeated: RepeatedPass | None = None
    storage_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class CapturedCalls:
    """Calls of a CUDA graph: their records, the passes among them, and the optimizers that took a step."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    passes: list[frozenset[int]] = field(default_factory=list)
    stepped: list[Any] = field(default_factory=list)


class _Place(threading.local):
    """State of a thread: open calls and modules, the running autograd node."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.modules: list[str] = []
        self.node: Any = None
        self.node_parent: int | None = None
        self.forward_nodes = torch._C._autograd._get_sequence_nr()  # of this thread, like the number itself
        self.last_sequence: int | None = None
        self.last_module = ""
        self.last_line = ""


class Recorder(TorchDispatchMode):
    """Collector of :class:`OperatorCall` while it is entered. ``paths``: id of a module -> its path. ``streams``:
    streams created earlier by the script.
    """

    def __init__(self, paths: Mapping[int, str], streams: StreamState | None = None) -> None:
        super().__init__()
        self.convert = Converter()
        self.results = KnownResults()
        self.enabled = True
        self.phase: Phase = "forward"
        self.streams = streams or StreamState()
        self.streams.note = self.host_call
        # Handler of collectives in the capture of a distributed job.
        self.communication: Any = None
        self.bucket_mb: float | None = None
        self.paths = paths
        self.ranges = ScriptRanges()
        self.compiled: list[str] = []  # names of compiled functions and modules (`torch.compile`)
        # Their calls, and custom operators, of a program that runs as it is; None for a script's step.
        self.regions: Regions | None = None
        self.custom: CustomOperators | None = None
        # Calls that CUDA graphs replay, and compiled modules whose calls they are.
        self.graphs = Regions(apart=True)
        self.graphed: set[int] = set()
        # True while a CUDA graph is captured; optimizers that take a step in it.
        self.capturing = False
        self.stepped: list[Any] = []
        # Called with each optimizer whose step a CUDA graph replays.
        self.replayed_step: Callable[[Any], None] = ignore_call
        # Context in which PyTorch functions are decided as on CUDA, for implementations that run below them.
        self.decisions: Callable[[], AbstractContextManager[Any]] = nullcontext
        # Lengths of every backward pass so far, and of forward passes of the whole module since (OperatorTrace.passes).
        self.passes: list[frozenset[int]] = []
        self._lengths: set[int] = set()
        self._rows: list[dict[str, Any]] = []
        self._here = _Place()
        self._module_of: dict[int, str] = {}
        self._line_of: dict[int, str] = {}
        # True to note the line of the script that makes each call.
        self.noting_lines = False
        self._stream_of: dict[int, int] = {}
        self._gradients: str | None = None
        # Places of the records that begin a pass: the first one, and each first one after a backward pass.
        self.begins = [0]
        # True while a pass of accumulated gradients is left out.
        self.leaving_out = False
        # Passes left out in this step.
        self.left_out = 0
        # True from a pass that is not run, of an evaluation, to the next one that is.
        self.passing_over = False

        # Number of operators called so far, recorded or not.
        self.called = 0
        # Unknown flags read since the last call of a module.
        self._flags = 0
        # True after a call that selects by data.
        self.selected = False
        # Python functions called since the last record (:mod:`e2e.capture.python_calls`), if they are counted.
        self.functions, self.counting = 0, False
        self.count: Callable[[FrameType, str, Any], None] | None = None

    # --- interface of the session ----------------------------------------------------------------

    def begin(self) -> None:
        """Begin to record, and to count functions: models are made in millions of them, which do not count."""
        self.enabled = True
        if self.count is not None:
            sys.setprofile(self.count)

    def add_functions(self, number: int) -> None:
        """Add to the functions called since the last record those of a library that is stood in for."""
        if self.enabled:
            self.functions += number

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context without recording."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def frame(self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Iterator[_Frame]:
        """Context of the call ``name``, which encloses the records made inside."""
        frame = _Frame(name, args, kwargs or {}, self.ranges.innermost)
        self._here.frames.append(frame)
        try:
            yield frame
        finally:
            self._here.frames.remove(frame)

    def finish_frame(self, frame: _Frame, result: Any) -> None:
        """Note the output of an enclosing call."""
        if frame.id is not None and self.enabled:
            self._rows[frame.id]["outputs"] = self.convert.values(result)

    def annotation(self, name: str) -> _Frame:
        """Open a frame that :meth:`close` ends: the optimizer's hooks are two separate calls."""
        frame = _Frame(name, (), {}, self.ranges.innermost)
        self._here.frames.append(frame)
        return frame

    def close(self, frame: _Frame) -> None:
        """End a frame opened by :meth:`annotation`."""
        self._here.frames.remove(frame)

    def note_gradients(self, cleared: bool) -> None:
        """Note a call of ``zero_grad``: gradients are freed (``cleared``), or set to zero in the same memory.

        In the first step, which is recorded, there may be none.
        """
        if self.enabled:
            self._gradients = "cleared" if cleared else "kept"

    def enter_module(self, module: torch.nn.Module) -> None:
        """Begin a module, which encloses the following calls."""
        self._flags = 0
        self._here.modules.append(self.paths.get(id(module), self._here.modules[-1] if self._here.modules else ""))
        if self.regions is not None and type(module).__name__.endswith("OptimizedModule"):
            self.regions.enter()
        if id(module) in self.graphed:
            self.graphs.enter()

    def leave_module(self, module: torch.nn.Module, given: Any, *named_and_returned: Any) -> Any:
        """End ``module``, which was entered last: called with ``given`` and named arguments, which PyTorch leaves out
        after an error, it returned the last. Return what the program gets for it.
        """
        *named, returned = named_and_returned
        if self._here.modules:
            self._here.modules.pop()
        if self.regions is not None and type(module).__name__.endswith("OptimizedModule"):
            self.regions.leave()
        if id(module) in self.graphed:
            self.graphs.leave()
        whole = self.paths.get(id(module)) == "" and torch._C._current_graph_task_id() == -1
        if self.enabled and whole:
            self._lengths.update([*_lengths((given, returned))] or _lengths(named))
        compiled = self.regions is not None and type(module).__name__.endswith("OptimizedModule")
        return self.hand_on(returned) if compiled and self.regions is not None and not self.regions.inside else None

    def hand_on(self, returned: Any) -> Any:
        """Note what a compiled region has ``returned``: it writes that, whoever reads it. Return it as results of one
        autograd node.
        """
        if not self.enabled or not self._rows or torch._C._current_graph_task_id() != -1:
            return returned
        identities, leaves = self.convert.identities, tree_leaves(returned)
        with torch._C.DisableTorchFunction(), self.paused():
            found = [each for each in leaves if type(each) is torch.Tensor and each.is_meta]
            self._rows[-1].setdefault("attributes", {})[RETURNED] = tuple(map(identities.storage, found))
            trained = {id(each): each for each in found if each.grad_fn is not None and not each._is_view()}
            if len(trained) < 2:
                return returned
            results = dict(zip(trained, CompiledFunction.apply(identities.alias, *trained.values()), strict=True))
            for each in results.values():
                identities.tensor(each)
        return tree_map_only(torch.Tensor, lambda each: results.get(id(each), each), returned)

    @property
    def recorded(self) -> int:
        """Number of calls recorded since the last cut."""
        return len(self._rows)

    @property
    def depth(self) -> int:
        """Number of modules that the current call is inside of."""
        return len(self._here.modules)

    def pass_begins(self) -> list[int]:
        """Return the places of the records that begin the passes of this step; the last one is that of the next
        record if a backward pass has just ended.
        """
        if self._rows and self._rows[-1]["thread"] == AUTOGRAD_THREAD and self.begins[-1] != len(self._rows):
            self.begins.append(len(self._rows))
        return self.begins

    @property
    def finished_passes(self) -> int:
        """Number of passes of this step whose backward pass has ended."""
        return len(self.pass_begins()) - 1 + self.left_out

    def records(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return the records of a pass."""
        return self._rows[begin:end]

    def leave_out(self) -> None:
        """Leave the pass that has begun out, until it has ended: it is like the one before."""
        self._forget(self.pass_begins()[-1])
        self.enabled, self.leaving_out = False, True
        self.left_out += 1
        if self.left_out > MOST_PASSES:
            raise EndlessStepError(f"has made {MOST_PASSES:,} passes without a step of its optimizer")
        self.passes += self.passes[-1:]

    def pass_over(self) -> None:
        """Stop recording between passes of an evaluation, the next of which is not run."""
        self.enabled, self.passing_over = False, True
        sys.setprofile(None)

    def go_on(self) -> None:
        """Go on recording after a pass that was not run, some of whose tensors are used by the next one."""
        if self.passing_over:
            sys.setprofile(self.count)
        self.enabled, self.leaving_out, self.passing_over, self.functions = True, False, False, 0
        self.convert.identities.adopting = True

    @contextmanager
    def captured(self) -> Iterator[CapturedCalls]:
        """Context in which calls do not run but are captured for :meth:`replay`."""
        enabled, begins, passes, begin = self.enabled, self.begins, self.passes, len(self._rows)
        self.enabled, self.begins, self.passes, self.capturing, found = True, [begin], [], True, CapturedCalls()
        try:
            yield found
        finally:
            found.rows, found.passes, found.stepped = self._rows[begin:], self.passes, self.stepped
            self._forget(begin)
            self.enabled, self.begins, self.passes, self.capturing, self.stepped = enabled, begins, passes, False, []

    def replay(self, captured: CapturedCalls) -> None:
        """Record calls that were captured, as one launch."""
        begin = len(self._rows)
        for row in captured.rows:
            parent, later = row["parent"], begin - captured.rows[0]["id"]
            inside = parent is not None and parent >= captured.rows[0]["id"]
            self._rows.append({**row, "id": len(self._rows), "parent": parent + later if inside else None})
        self.passes += captured.passes
        self.graphs.note_replay(range(begin, len(self._rows)))

    def _forget(self, begin: int) -> None:
        """Remove the records from ``begin`` on; what was freed before them is noted again."""
        for row in self._rows[begin:]:
            self.convert.identities.free(row.get("attributes", {}).get("freed", ()))
        self.ranges.forget(begin)
        if self.regions is not None:
            self.regions.forget(begin)
        self.graphs.forget(begin)
        del self._rows[begin:]
        for frame in self._here.frames:
            if frame.id is not None and frame.id >= begin:
                frame.id = None
        self._here.node, self._here.node_parent = None, None

    def cut(self) -> RecordedStep:
        """Return what was recorded since the last cut, and go on recording."""
        if self._gradients is not None and self._rows:
            self._rows[-1].setdefault("attributes", {})["gradients"] = f"{self._gradients} behind"
            self._gradients = None
        self._drop_compiled_functions()
        found = RecordedStep(
            tuple(OperatorCall(**row) for row in self._rows),
            self.ranges.found(),
            tuple(self.passes),
            {} if self.regions is None else self.regions.cut(),
            self.graphs.cut(),
            storage_bytes=self.convert.identities.bytes(),
        )
        self._rows, self.passes, self.ranges = [], [], ScriptRanges()
        if self.leaving_out or self.passing_over:
            self.go_on()
        self.begins, self.left_out, self.convert.identities.adopting = [0], 0, False
        self._here.node, self._here.node_parent = None, None
        for frame in self._here.frames:
            frame.id, frame.entry = None, None
        return found

    def calls(self) -> tuple[OperatorCall, ...]:
        """Return the recorded calls, in the order in which they began.

        The recorder is emptied: objects of PyTorch that are never freed, such as hooks of DDP, would keep the records
        alive.
        """
        self.convert.identities.release()
        if self._gradients is not None and self._rows:
            self._rows[-1].setdefault("attributes", {})["gradients"] = f"{self._gradients} behind"
        self._drop_compiled_functions()
        found = tuple(OperatorCall(**row) for row in self._rows)
        self.enabled, self._rows, self.results, self.streams.note = False, [], KnownResults(), ignore_call
        return found

    def _drop_compiled_functions(self) -> None:
        """Drop the counts of functions in regions, which do not run there."""
        for regions in (self.regions, self.graphs):
            for call in () if regions is None else regions.parts:
                if call < len(self._rows):
                    self._rows[call]["functions"] = 0

    def host_call(self, name: str, **attributes: Value) -> None:
        """Record a runtime call that is not an operator, such as ``cudaDeviceSynchronize``."""
        if self.enabled:
            self._begin(name)["attributes"] = attributes

    def record_call(self, name: str, inputs: Any, outputs: Any, attributes: Mapping[str, Value]) -> None:
        """Record an operator that was carried out elsewhere."""
        if not self.enabled:
            return
        row = self._begin(name)
        row["inputs"] = self.convert.values(inputs)
        row["attributes"] = self._with_stream({**attributes, **self._memory_changes()})
        row["outputs"] = self.convert.values(outputs)

    def allocated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that no recorded operator has allocated the memory of ``tensors``."""
        for tensor in tensors if self.enabled else ():
            self.convert.identities.adopt(tensor)

    def note_numbers(self, count: int) -> None:
        """Note that the last call took ``count`` numbers from a list of the script, one by one."""
        if self.enabled and self._rows and self._rows[-1]["name"] == "aten::lift_fresh":
            self._rows[-1]["attributes"][NUMBERS] = count

    def copies_into(self, tensor: torch.Tensor) -> list[dict[str, Any]]:
        """Return the records of copies into the memory of ``tensor`` so far, last first; they may be amended."""
        storage = self.convert.identities.storage(tensor)
        copies = (row for row in reversed(self._rows) if row["name"] == "aten::copy_")
        return [row for row in copies if row["inputs"][0].storage == storage]

    # --- called by PyTorch -----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with Uncounted():
            return self._called(func, types, args, kwargs)

    def _called(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self.called += 1
        if self.called > MOST_CALLED:
            raise EndlessStepError(f"has called {MOST_CALLED:,} operators")
        if types:
            if any(is_wrapper(kind) for kind in types):
                return NotImplemented  # the subclass calls the operators that do the work
            if any(kind is FakeTensor for kind in types):
                return func(*args, **(kwargs or {}))  # a library computes shapes
        # Calls that PyTorch makes to find shapes are not calls of the script.
        with torch._C.DisableTorchFunction():
            if self.communication is not None and func.namespace in self.communication.NAMESPACES:
                return self.communication.call(func, args, kwargs or {})
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # there is no memory to pin
        selecting = SELECTIONS.get(func if func.namespace == "aten" else func.name())
        if selecting is not None and selecting.applies(args):
            self.selected = True
            with self, self._framed(func):
                return selecting.apart(*args, **kwargs)
        # What a data loader's worker does takes no time of the program's own process.
        if not self.enabled or self._is_artefact(func, args) or get_worker_info() is not None:
            return self._result(func, args, kwargs)
        body = None if self.custom is None else self.custom.implementation(func)
        if body is not None:
            ran, result = self._inside(func, body, args, kwargs)
            if ran:
                return result
        row = self._open(func, args, kwargs)
        result = self._result(func, args, kwargs)
        if row["name"] in (ASSUMED, *EVEN_COUNTS) and is_assumed(row["name"], args[0]):
            row["attributes"]["assumed"] = True
        if self._accumulates(func, args, kwargs):
            row["name"] = "aten::add_"
            self.convert.identities.alias(result, args[0])
        row["outputs"] = self.convert.values(result)
        as_on_gpu(row, self._rows)
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _READ and args[0].dtype is torch.bool and args[0].device.type == "meta" and known(args[0]) is None:
            self._flags += 1
            if self._flags > MOST_FLAGS:
                raise EndlessStepError(f"has read {MOST_FLAGS:,} flags that data decide")
        result = self.results.run(func, args, kwargs)
        follow(func, args, kwargs, result)
        note(func, args, kwargs, result)
        return result

    def _inside(self, func: Any, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the implementation of a custom operator, and return True and its result; False if it fails, without a
        trace.
        """
        before = len(self._rows)
        try:
            with torch._C._EnableTorchFunction(), self.decisions(), self, self._framed(func):
                return True, body(*args, **kwargs)
        except (EndlessStepError, NotYetSent):
            raise
        except Exception:
            self._forget(before)
            return False, None

    def _framed(self, func: Any) -> AbstractContextManager[Any]:
        """Return a frame of the call ``func`` around its components, unless it has one already."""
        name = func.name().partition(".")[0]
        if self._here.frames and self._here.frames[-1].name == name:
            return nullcontext()
        return self.frame(name)

    def _is_artefact(self, func: Any, args: tuple[Any, ...]) -> bool:
        """True for calls that exist only in a recording below autograd: marks of the profiler, detaching of saved
        results, and copies of sparse gradients.

        Without a recorder autograd saves a result without calling an operator. The script's own ``detach`` has a frame,
        and a gradient is really detached when it becomes ``.grad``. A sparse gradient becomes ``.grad`` as it is if
        nothing else refers to it; recorded tensors also have a Python object.
        """
        if func is _CLONE and args[0].layout is torch.sparse_coo:
            node = torch._C._current_autograd_node()
            return node is not None and node.name() == ACCUMULATE_GRAD
        if func is _DETACH:
            if self._here.frames and self._here.frames[-1].name == "aten::detach":
                return False
            node = torch._C._current_autograd_node()
            return node is None or node.name() != ACCUMULATE_GRAD
        return func.namespace == "profiler"

    def _accumulates(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the autograd engine adds two gradients of one tensor.

        It adds in place if it holds the only reference to the first of them; recorded tensors also have a Python
        object, so here it never does. No derivative formula adds two tensors of the same shape, and a script's own
        addition has a frame.
        """
        if func is not _ADD or kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        if self._here.frames and self._here.frames[-1].name == "aten::add":
            return False
        first, second = args[0], args[1]
        alike = isinstance(second, torch.Tensor) and first.shape == second.shape and first.device == second.device
        dense = first.layout is torch.strided
        return alike and dense and first.is_floating_point() and 0 not in first.stride()

    def _recomputes(self) -> bool:
        """True if a forward pass runs again inside the backward pass (``torch.utils.checkpoint``): functions of the
        script with gradients on, while autograd itself computes without.
        """
        return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled() and bool(self._here.frames)

    def _open(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        name, _, overload = func.name().partition(".")
        row = self._begin(name)
        self._adopt(args, kwargs)
        row["inputs"] = tuple(self.convert.value(argument) for argument in args)
        attributes: dict[str, Value] = {"overload": overload} if overload else {}
        attributes.update((key, self.convert.value(value)) for key, value in kwargs.items())
        attributes |= self._memory_changes()
        if self._gradients is not None:
            attributes["gradients"], self._gradients = self._gradients, None
        if self._recomputes():
            attributes[RECOMPUTED] = True
        row["attributes"] = self._with_stream(attributes)
        return row

    def _adopt(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Note the memory of arguments that calls left out have made; return True if that may be so."""
        identities = self.convert.identities
        if identities.adopting:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, torch.Tensor):
                    identities.adopt(each)
        return identities.adopting

    def _memory_changes(self) -> dict[str, Value]:
        """Return the storages freed and those allocated by no operator since the last call, as attributes."""
        changes = {"freed": self.convert.identities.freed(), "made": self.convert.identities.made()}
        return {name: storages for name, storages in changes.items() if storages}

    def _begin(self, name: str) -> dict[str, Any]:
        """Append a new record with its thread, enclosing calls and module."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:
            self.pass_begins()
        line = script_line() if self.noting_lines else ""
        if in_backward and self._lengths:
            self.passes.append(frozenset(self._lengths))
            self._lengths.clear()
        if in_backward:
            parent, sequence, module = self._backward_parent(name)
            line = self._here.last_line or line
        else:
            self._here.node = None
            if self.streams.node != DEFAULT_STREAM:
                self._enter_stream(DEFAULT_STREAM)
            parent, sequence, module = self._script_parent(name), self._forward_sequence(line), self._module()
        thread = AUTOGRAD_THREAD if in_backward else MAIN_THREAD
        return self._append(name, parent, thread, "backward" if in_backward else self.phase, sequence, module, line)

    def _with_stream(self, attributes: dict[str, Value]) -> dict[str, Value]:
        """Add the current stream to ``attributes``, unless it is the default one."""
        if self.streams.current != DEFAULT_STREAM:
            attributes["stream"] = self.streams.current
        return attributes

    def _append(
        self,
        name: str,
        parent: int | None,
        thread: int,
        phase: Phase,
        sequence: int | None = None,
        module: str = "",
        line: str = "",
    ) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": len(self._rows),
            "name": name,
            "parent": parent,
            "thread": thread,
            "phase": phase,
            "sequence": sequence,
            "module": module,
            "line": line,
            "functions": self.functions,
        }
        self.functions = 0
        self.ranges.note(row["id"], sequence if phase == "backward" else None)
        if self.regions is not None:
            self.regions.note(row["id"], phase == "backward", sequence)
        self.graphs.note(row["id"], phase == "backward", sequence)
        self._rows.append(row)
        if len(self._rows) > MOST_CALLS:
            if len(self.passes) > 1:
                raise ModelError(
                    f"a step has more than {MOST_CALLS:,} operators, in {len(self.passes)} passes so far; let it "
                    "accumulate fewer (LBFGS: a smaller max_iter): each of them takes as long"
                )
            raise EndlessStepError(f"has called {MOST_CALLS:,} operators in a step")
        return row

    def _module(self) -> str:
        return self._here.modules[-1] if self._here.modules else ""

    def _script_parent(self, name: str = "") -> int | None:
        """Return the innermost recorded call of the script; a frame with the name of its only operator is that
        operator.
        """
        parent: int | None = None
        for frame in self._here.frames:
            if frame.id is None and frame.name == name and frame is self._here.frames[-1]:
                break
            if frame.id is None:
                frame.id = self._append(frame.name, parent, MAIN_THREAD, self.phase, module=self._module())["id"]
                self.ranges.place(frame.id, frame.entry)
                adopted = self._adopt(frame.args, frame.kwargs)
                self._rows[frame.id]["inputs"] = tuple(self.convert.value(argument) for argument in frame.args)
                attributes: dict[str, Value] = {k: self.convert.value(v) for k, v in frame.kwargs.items()}
                self._rows[frame.id]["attributes"] = attributes | (self._memory_changes() if adopted else {})
            parent = frame.id
        return parent

    def _forward_sequence(self, line: str) -> int | None:
        """Return the number of the autograd node just made by this operator's autograd kernel, or None."""
        latest = torch._C._autograd._get_sequence_nr()
        if latest == self._here.forward_nodes:
            return None
        self._here.forward_nodes = latest
        self._module_of[latest - 1] = self._module()
        self._line_of[latest - 1] = line
        if self.regions is not None:
            self.regions.note_node(latest - 1)
        self.graphs.note_node(latest - 1)
        if self.streams.current != DEFAULT_STREAM:
            self._stream_of[latest - 1] = self.streams.current
        return latest - 1

    def _backward_parent(self, name: str) -> tuple[int | None, int | None, str]:
        """Return the running autograd node. Its object is kept, so that another node cannot have the same identity."""
        node = torch._C._current_autograd_node()
        if node is None or (node is self._here.node and self._here.node_parent is not None):
            return self._here.node_parent, self._here.last_sequence, self._here.last_module
        self._here.node = node
        number = node._sequence_nr()
        self._here.last_sequence = None if number == NO_SEQUENCE else number
        self._here.last_module = self._module_of.get(number, "")
        self._here.last_line = self._line_of.get(number, "")
        title = node.name()
        around = self._append(
            f"autograd::engine::evaluate_function: {title}",
            None,
            AUTOGRAD_THREAD,
            "backward",
            self._here.last_sequence,
            self._here.last_module,
        )
        inner = self._append(
            title, around["id"], AUTOGRAD_THREAD, "backward", self._here.last_sequence, self._here.last_module
        )
        for row in (around, inner):
            self.ranges.place(row["id"], self.ranges.around_backward)
        self._here.node_parent = inner["id"]
        self._enter_stream(self._stream_of.get(number, DEFAULT_STREAM))
        return self._here.node_parent, self._here.last_sequence, self._here.last_module

    def _enter_stream(self, stream: int) -> None:
        """Change to the stream of a node's forward operator, where autograd runs it, after the stream of its inputs."""
        before, self.streams.node = self.streams.node, stream
        self.streams.follow(stream, before)


def _lengths(value: Any) -> Iterator[int]:
    """Yield the lengths along the first dimension of the tensors on the GPU in ``value``: tuples, lists and mappings of
    them.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() and (value.is_cuda or value.is_meta):
            yield value.shape[0]
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _lengths(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _lengths(each)
