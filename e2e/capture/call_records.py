"""Records of operator calls: PyTorch's tensors and arguments as those of :mod:`e2e.step.operator_trace`, with unique
identities; operators that CUDA delegates to a library with names and arguments as in a trace from a GPU.

Without a GPU, PyTorch records the operator before the selection of a library (``aten::convolution``) or a
device-neutral one (``aten::native_batch_norm``).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from e2e.capture.environment import MemoryInUse
from e2e.step.operator_trace import Tensor, Value

DTYPE_NAMES = {
    getattr(torch, name): name
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    + ("float8_e4m3fn", "float8_e5m2", "complex64", "complex128")
}
# The meta device represents the GPU that this machine does not have.
DEVICE_NAMES = {"meta": "cuda:0", "cpu": "cpu"}


@cache
def is_wrapper(kind: Hashable) -> bool:
    """True if tensors of ``kind`` (DTensor, a result that is awaited on use) hold others that do the work."""
    return hasattr(kind, "__tensor_flatten__")


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` on this rank."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap, grad, jvp
        tensor = torch._C._functorch.get_unwrapped(tensor)
    kind: Any = type(tensor)
    while kind not in (torch.Tensor, torch.nn.Parameter) and is_wrapper(kind):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        tensor = getattr(tensor, names[0])
        kind = type(tensor)
    return tensor


class Identities:
    """Unique numbers of tensors and storages.

    Only weak references are held: a strong one would change autograd (it keeps a gradient in place, or adds into it, if
    there is no other reference), and an address alone is reused after its owner has been freed.
    """

    def __init__(self) -> None:
        # Tensor -> its number, a weak reference, and what notes its end.
        self._tensors: dict[int, tuple[int, Any, Any]] = {}
        # Storages that no known tensor holds since it got other memory, but perhaps an unknown one, by address.
        self._held: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._living: dict[int, int] = {}
        self._freed: list[int] = []
        self._made: list[int] = []
        self._count = 0
        # Bytes of storages on the GPU, and their sum.
        self._sizes: dict[int, int] = {}
        self.memory = MemoryInUse()
        self._watching = True
        # True where tensors may have been made by calls that were left out.
        self.adopting = False

    def adopt(self, tensor: torch.Tensor) -> None:
        """Note that the memory of ``tensor``, if it has no number yet, was allocated by a call that was left out."""
        tensor = unwrapped(tensor)
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._storages:
            self._made.append(self.storage(tensor))

    def tensor(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor."""
        key = tensor._cdata
        known = self._tensors.get(key)
        if known is None:
            end = self._watch(tensor, self.storage(tensor)) if tensor.layout is torch.strided else None
            known = self._tensors[key] = (len(self._tensors), torch._C._WeakTensorRef(tensor), end)
        return known[0]

    def _watch(self, tensor: torch.Tensor, storage: int) -> weakref.finalize[Any, Any]:
        """Count the tensors on a storage; the storage is free after the last of them."""
        self._living[storage] = self._living.get(storage, 0) + 1
        return weakref.finalize(tensor, self._died, storage)

    @contextmanager
    def moving(self, tensor: torch.Tensor) -> Iterator[None]:
        """Context in which ``tensor`` may get other memory (``tensor.data = other``): its earlier memory is free if no
        other tensor holds it, be it one that is not known.
        """
        tensor = unwrapped(tensor)
        number, reference, end = self._tensors.get(tensor._cdata, (0, None, None))
        if end is None:
            yield
            return
        address = tensor.untyped_storage()._cdata
        before = self._storages.get(address)
        yield
        after = self.storage(tensor)
        if after == before:
            return
        end.detach()
        self._tensors[tensor._cdata] = (number, reference, self._watch(tensor, after))
        if before is not None and self._living.get(before):
            self._living[before] -= 1
            if not self._living[before]:
                self._held[address] = before

    def _died(self, storage: int) -> None:
        if not self._living[storage]:
            return
        self._living[storage] -= 1
        if self._living[storage] == 0 and self._watching:
            self._free(storage)

    def freed(self) -> tuple[int, ...]:
        """Return the storages freed since the last call of this method, unless a tensor on them has appeared again."""
        for address, storage in list(self._held.items()):
            if self._living[storage] or torch.UntypedStorage._expired(address):
                del self._held[address]
                if not self._living[storage]:
                    self._free(storage)
        found = tuple(storage for storage in self._freed if self._living[storage] == 0)
        self._freed.clear()
        return found

    def free(self, storages: Iterable[int]) -> None:
        """Return ``storages`` by the next call of :meth:`freed` once more."""
        self._freed += storages

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, the same for all of its views."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            storage._weak_ref()
            known = self._storages[key] = self._count
            self._count += 1
            if tensor.device.type == "meta":
                self._sizes[known] = storage.nbytes()
                self.memory.change(storage.nbytes())
        return known

    def _free(self, storage: int) -> None:
        self._freed.append(storage)
        self.memory.change(-self._sizes.pop(storage, 0))

    def alias(self, tensor: torch.Tensor, storage_of: torch.Tensor) -> None:
        """Treat ``tensor``, not seen before, as a view of the memory of ``storage_of``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            storage._weak_ref()
        self._storages[storage._cdata] = self.storage(storage_of)

    def emptied(self, tensor: torch.Tensor) -> None:
        """Note that the memory of ``tensor`` was freed while the tensor lives on; its later memory gets a new
        number.
        """
        known = self._storages.pop(tensor.untyped_storage()._cdata, None)
        if known is not None:
            torch.UntypedStorage._free_weak_ref(tensor.untyped_storage()._cdata)
            self._held.pop(tensor.untyped_storage()._cdata, None)
            self._living[known] = 0
            self._free(known)

    def refilled(self, tensor: torch.Tensor) -> None:
        """Note that the memory of ``tensor``, freed before, is allocated again, without content."""
        self._made.append(self.storage(tensor))

    def made(self) -> tuple[int, ...]:
        """Return the storages allocated by no operator since the last call of this method."""
        found = tuple(self._made)
        self._made.clear()
        return found

    def bytes(self) -> dict[int, int]:
        """Return the bytes of each storage on the GPU that is not free."""
        return dict(self._sizes)

    def release(self) -> None:
        """Release the weak references."""
        for key in self._storages:
            torch.UntypedStorage._free_weak_ref(key)
        self._storages, self._tensors, self._held = {}, {}, {}
        self._watching = False


class Converter:
    """Converter of operator arguments and results to :data:`e2e.step.operator_trace.Value`."""

    def __init__(self) -> None:
        self.identities = Identities()

    def tensor(self, tensor: torch.Tensor) -> Tensor:
        """Return the record of ``tensor``; a sparse one has the shape of the values that it holds, no strides and no
        single storage.
        """
        tensor = unwrapped(tensor)
        strided = tensor.layout is torch.strided
        held = tensor._values() if tensor.layout is torch.sparse_coo else tensor
        return Tensor(
            id=self.identities.tensor(tensor),
            storage=self.identities.storage(tensor) if strided else -1,
            shape=tuple(held.shape),
            dtype=DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch."),
            device=DEVICE_NAMES.get(tensor.device.type) or str(tensor.device),
            stride=tensor.stride() if strided else None,
        )

    def value(self, value: Any) -> Value:
        """Convert ``value`` to a record; values without a counterpart (generators, script objects) become ``None``."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (tuple, list)):
            return tuple(self.value(item) for item in value)
        if isinstance(value, torch.dtype):
            return DTYPE_NAMES.get(value, str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return DEVICE_NAMES.get(value.type, str(value))
        if isinstance(value, (torch.memory_format, torch.layout)):
            return str(value).removeprefix("torch.")
        return None

    def values(self, values: Any) -> tuple[Value, ...]:
        """Convert the results of an operator (one value, none or several) to a tuple."""
        if values is None:
            return ()
        if isinstance(values, (tuple, list)):
            return tuple(self.value(value) for value in values)
        return (self.value(values),)


def as_on_gpu(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename the call ``row``, the last of ``rows``, as on CUDA, and append its additional launches."""
    change = _CHANGES.get(row["name"])
    if change is not None and _on_gpu(row):
        change(row, rows)


def _on_gpu(row: dict[str, Any]) -> bool:
    first = row["inputs"][0] if row["inputs"] else None
    return isinstance(first, Tensor) and first.device != "cpu"


def _convolution(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename a convolution: cuDNN computes the products; a separate kernel adds the bias (``_convolution`` in
    Convolution.cpp).
    """
    data, weight, bias, stride, padding, dilation, transposed, output_padding, groups = row["inputs"]
    flags = (False, False, True)
    if transposed:
        row["name"] = "aten::cudnn_convolution_transpose"
        row["inputs"] = (data, weight, padding, output_padding, stride, dilation, groups, *flags)
    else:
        row["name"] = "aten::cudnn_convolution"
        row["inputs"] = (data, weight, padding, stride, dilation, groups, *flags)
    if isinstance(bias, Tensor):
        output = row["outputs"][0]
        shaped = Tensor(
            bias.id, bias.storage, (1, *bias.shape, *(1 for _ in output.shape[2:])), bias.dtype, bias.device
        )
        rows.append({**row, "id": len(rows), "name": "aten::add_", "inputs": (output, shaped), "outputs": (output,)})


def _batch_norm(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename a batch norm under the conditions of ``_batch_norm_impl_index``: float32, or float16 with float32
    parameters; at least 3 dims.
    """
    backward = row["name"] == "aten::native_batch_norm_backward"
    data = row["inputs"][1 if backward else 0]
    weight = row["inputs"][2 if backward else 1]
    if not isinstance(weight, Tensor) or len(data.shape) < 3 or weight.dtype != "float32":
        return
    if data.dtype not in ("float32", "float16"):
        return
    row["name"] = "aten::cudnn_batch_norm_backward" if backward else "aten::cudnn_batch_norm"
    node = row["parent"] if backward else None
    while node is not None:  # the node of autograd and the engine's work around it have a name of their own
        rows[node]["name"] = rows[node]["name"].replace("NativeBatchNormBackward", "CudnnBatchNormBackward")
        node = rows[node]["parent"]


_CHANGES = {
    "aten::convolution": _convolution,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm,
}
