"""Changes to the captured parts of a step: products in chunks, gradients of weights in place, merged kernels.

**Chunks** (``tp-overlap=yes``), as in Transformer Engine's user buffers (``tp_comm_overlap`` of NeMo and Megatron-LM)
and torchtitan's async tensor parallelism, with sequence parallelism among ``tp`` ranks:

* the input of a product is passed round a ring in ``tp - 1`` pieces, and the product is split into ``tp``: the rank's
  own piece is computed while the next one arrives;
* the output of a product is scattered piece by piece while the next piece is computed;
* in the backward pass of a column-parallel product, the input gathered again arrives during one of its two products,
  and the gradient of the input is scattered during the other ("bulk" overlap, as in plain Megatron-LM too).

Pieces are copied between buffers without an NCCL call each: together they take as long as the whole message.

In 8 bits Transformer Engine gathers data after the cast (``with_quantized_all_gather`` of its linear layers), with or
without overlap: every rank casts its own part of the sequence, half the bytes are sent, and the copy for the gradient
of the weights is transposed afterwards (:func:`gathered_in_8_bits`).

**Gradients of weights** accumulate in place in Megatron-LM: their products add to the values of earlier passes.

**Merged kernels** (:class:`Condenser`), for models of very many kernels: a run of ``kernels`` launches becomes one
task, first all of its host time, then all of its device time. Host and device still overlap run by run; the order
within a run is lost, which delays the device by at most one run. Kernels are priced with the whole step
(:func:`e2e.price.pricing.price`), since prices may depend on its mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from costmodel.operators.device_work import Elementwise, Gemm, Rearrangement, ScaledCast, ScaledGemm
from e2e.parallelism.pieces import Item, LayerCollective, Pieces, Ready, Work
from e2e.price.pricing import HostOverheads, HostPrices, fitted, launching_calls
from e2e.step.execution_graph import CallInfo, HostWork, Kernel, OverheadKind

Key = TypeVar("Key")


def beside_products(pieces: Pieces, tp: int) -> Pieces:
    """Rewrite ``pieces`` of a rank with sequence parallelism among ``tp`` ranks; work and bytes stay the same."""
    return pieces.with_items(lambda items: overlapped(items, tp))


def gathered_in_8_bits(items: Sequence[Item], tp: int) -> tuple[Item, ...]:
    """Return ``items`` with casts of the data gathered by ``tp`` ranks moved before the gather, each over the rank's
    own part.
    """
    found: list[Item] = []
    place = 0
    while place < len(items):
        item = items[place]
        place += 1
        casts = _casts_behind(items, place) if _of_tensor_ranks(item, "all_gather") else 0
        if not casts:
            found.append(item)
            continue
        assert isinstance(item, LayerCollective)
        whole = 0  # values of the first cast, which is of the gathered data; other casts are of weights
        both: Work | None = None
        for each in items[place : place + casts]:
            operator = each.operators[0] if isinstance(each, Work) else None
            if isinstance(operator, ScaledCast) and both is None and whole in (0, operator.elements):
                whole = operator.elements
                own = replace(operator, rows=-(-operator.rows // tp), outputs=min(operator.outputs, 1))
                both = replace(each, operators=(own,)) if isinstance(each, Work) and operator.outputs else None
                each = replace(each, operators=(own,)) if isinstance(each, Work) else each
            found.append(each)
        found.append(replace(item, size_bytes=item.size_bytes // 2))
        place += casts
        while place < len(items) and isinstance(items[place], HostWork):
            found.append(items[place])
            place += 1
        found.append(items[place])  # the product
        place += 1
        if both is not None:
            turned = Rearrangement("transpose", whole, both.operators[0].columns, "float8")  # type: ignore[union-attr]
            found += [HostWork("T5", both.call), replace(both, name="float8::transpose", operators=(turned,))]
    return tuple(found)


def _casts_behind(items: Sequence[Item], place: int) -> int:
    """Return the number of items from ``place`` on that prepare 8-bit operands for the next product; 0 if there are
    none.
    """
    cast, at = False, place
    while at < len(items) and not _is_product(items[at]):
        item = items[at]
        if isinstance(item, Work):
            operator = item.operators[0] if item.operators else None
            scale = isinstance(operator, Elementwise) and operator.elements == 1
            if not scale and not isinstance(operator, ScaledCast):
                return 0
            cast = cast or (isinstance(operator, ScaledCast) and operator.outputs > 0)
        elif isinstance(item, LayerCollective | Ready):
            return 0
        at += 1
    if at == len(items) or not cast:
        return 0
    while isinstance(items[at - 1], HostWork):  # of the product's launch
        at -= 1
    return at - place


def overlapped(items: Sequence[Item], tp: int) -> tuple[Item, ...]:
    """Rewrite one list of items."""
    return tuple(_scattered(list(_gathered(_in_bulk(list(items)), tp)), tp))


def _in_bulk(items: list[Item]) -> list[Item]:
    """Move the reduce-scatter after two or more products, the first of which overlaps a gather, to before the last of
    them.
    """
    found: list[Item] = []
    products: list[int] | None = None  # indices in ``found``, since an early gather
    for item in items:
        if isinstance(item, LayerCollective):
            run = products if products is not None else _scaled_before(found)
            if _of_tensor_ranks(item, "reduce_scatter") and len(run) > 1:
                found.insert(run[-1], replace(item, early=True))
                products = None
                continue
            products = [] if item.early else None
        elif products is not None and _is_product(item):
            products.append(len(found))
        found.append(item)
    return found


def _scaled_before(items: Sequence[Item]) -> list[int]:
    """Return the indices of the 8-bit products at the end of ``items``: gradients of an input and of weights, for which
    nothing is gathered again.
    """
    places: list[int] = []
    for place in range(len(items) - 1, -1, -1):
        item = items[place]
        if isinstance(item, Work):
            if not (_is_product(item) and isinstance(item.operators[0], ScaledGemm)):
                break
            places.insert(0, place)
        elif isinstance(item, LayerCollective):
            break
    return places


def _gathered(items: list[Item], tp: int) -> Iterator[Item]:
    place = 0
    while place < len(items):
        item = items[place]
        run = _products_behind(items, place)
        if not _waited_for(item, "all_gather") or not run:
            yield item
            place += 1
            continue
        assert isinstance(item, LayerCollective)
        end = run[-1] + 1
        between = [each for each in items[place + 1 : end] if not isinstance(each, Work)]
        works = [each for at in run if isinstance(each := items[at], Work)]
        piece = replace(item, size_bytes=-(-item.size_bytes // (tp - 1)), early=True, pieces=tp - 1)
        yield from between
        for number in range(tp):
            if number < tp - 1:
                yield piece
            yield from _pieces(works, tp, number)
        place = end


def _scattered(items: list[Item], tp: int) -> Iterator[Item]:
    for place, item in enumerate(items):
        following = next((each for each in items[place + 1 :] if not isinstance(each, HostWork | Ready)), None)
        before = next((each for each in reversed(items[:place]) if not isinstance(each, HostWork | Ready)), None)
        if isinstance(item, Work) and _makes(item, following):
            assert isinstance(following, LayerCollective)
            piece = replace(following, size_bytes=-(-following.size_bytes // tp), early=True, pieces=tp)
            for number in range(tp):
                yield from _pieces([item], tp, number)
                if number < tp - 1:
                    yield piece
        elif isinstance(item, LayerCollective) and _makes(before, item):
            yield replace(item, size_bytes=-(-item.size_bytes // tp), pieces=tp)
        else:
            yield item


def _makes(item: Item | None, scattered: Item | None) -> bool:
    """True if ``item`` is a whole product and ``scattered``, the next item, the reduce-scatter of its output."""
    return _is_product(item) and not _cut(item) and _waited_for(scattered, "reduce_scatter")


def _products_behind(items: Sequence[Item], place: int) -> list[int]:
    """Return the indices of the directly following products: all of them in a forward pass; only the first if gradients
    of weights are among them.
    """
    found: list[int] = []
    for at in range(place + 1, len(items)):
        item = items[at]
        if _is_product(item):
            found.append(at)
        elif isinstance(item, Ready):
            return found[:1]
        elif not isinstance(item, HostWork):
            break
    return found


def _pieces(works: Sequence[Work], tp: int, number: int) -> Iterator[Item]:
    """Yield piece ``number`` of ``tp`` pieces of each product; the first is launched by the launch of the whole."""
    for work in works:
        if number:
            yield HostWork("T5", work.call)
        operators = tuple(
            replace(each, m=-(-each.m // tp)) if isinstance(each, Gemm | ScaledGemm) else each
            for each in work.operators
        )
        yield replace(work, name=f"{work.name}{_PIECE}", operators=operators)


_PIECE = ", in pieces"


def _cut(item: Item | None) -> bool:
    return isinstance(item, Work) and item.name.endswith(_PIECE)


def _waited_for(item: Item | None, kind: str) -> bool:
    return _of_tensor_ranks(item, kind) and isinstance(item, LayerCollective) and not item.early


def _of_tensor_ranks(item: Item | None, kind: str) -> bool:
    return isinstance(item, LayerCollective) and item.kind == kind and item.group == "tp"


def _is_product(item: Item | None) -> bool:
    return isinstance(item, Work) and len(item.operators) == 1 and isinstance(item.operators[0], Gemm | ScaledGemm)


Product = Gemm | ScaledGemm


def added_in_place(pieces: Pieces, element_bytes: int, dtype: str) -> Pieces:
    """Return ``pieces`` whose products add gradients of weights to values of ``dtype``, in every pass, as in
    Megatron-LM (``gradient_accumulation_fusion``).

    ``element_bytes``: bytes of a gradient's element in the capture.
    """
    backward = {
        name: replace(part, items=_accumulating(part.items, element_bytes, dtype))
        for name, part in pieces.backward.items()
    }
    return replace(pieces, backward=backward, accumulate=backward)


def _accumulating(items: Sequence[Item], element_bytes: int, dtype: str) -> tuple[Item, ...]:
    found = list(items)
    taken: set[int | None] = set()
    for place, item in enumerate(items):
        if not isinstance(item, Ready):
            continue
        for each in _products_of(items, place, item.size_bytes // element_bytes, taken):
            work = items[each]
            assert isinstance(work, Work)
            adding = tuple(replace(one, accumulates=dtype) for one in work.operators if isinstance(one, Product))
            found[each] = replace(work, operators=adding)
    return tuple(found)


def _products_of(items: Sequence[Item], ready: int, elements: int, taken: set[int | None]) -> list[int]:
    """Return the indices of the products of the last call before ``ready`` whose outputs have ``elements`` together, as
    those of all experts of a layer; calls in ``taken`` belong to other gradients.
    """
    made: dict[int | None, list[int]] = {}
    sizes: dict[int | None, int] = {}
    for place in range(ready - 1, -1, -1):
        item = items[place]
        if not isinstance(item, Work) or item.call in taken:
            continue
        products = [each for each in item.operators if isinstance(each, Product)]
        if not products or len(products) < len(item.operators):
            continue
        made.setdefault(item.call, []).append(place)
        size = sum(each.m * each.n * (each.batch if isinstance(each, Gemm) else 1) for each in products)
        sizes[item.call] = sizes.get(item.call, 0) + size
        if sizes[item.call] == elements:
            taken.add(item.call)
            return made[item.call]
    return []


KERNELS = 8
NOTHING = fitted(0.0)


@dataclass
class Condenser:
    """Merger of runs of kernels. ``overheads`` prices the host, as in :func:`e2e.price.pricing.price`."""

    overheads: HostOverheads
    kernels: int = KERNELS
    _host: HostPrices = field(init=False)

    def __post_init__(self) -> None:
        self._host = HostPrices(self.overheads)

    def pieces(self, pieces: Pieces) -> Pieces:
        """Condense all parts of ``pieces``."""
        return pieces.with_items(lambda items: self.items(items, pieces.calls))

    def items(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """Condense one list of items, such as an optimizer's."""
        launching = launching_calls(items)
        found: list[Item] = []
        run: list[Work] = []
        host: dict[OverheadKind, float] = {}
        awaited = False  # the item after the next kernel waits for a collective
        for item in items:
            if isinstance(item, HostWork):
                host[item.kind] = host.get(item.kind, 0.0) + self._host.work(item, calls, launching).seconds
                continue
            if isinstance(item, Work):
                run.append(item)
                host["T4"] = host.get("T4", 0.0) + self._host.launch(item.kind).seconds
            if not isinstance(item, Work) or len(run) == self.kernels or awaited:
                found += _flushed(host, run)
                run, host = [], {}
                awaited = isinstance(item, LayerCollective) and item.early
            if not isinstance(item, Work):
                found.append(item)
        return (*found, *_flushed(host, run))


def _flushed(host: Mapping[OverheadKind, float], run: list[Work]) -> list[Item]:
    call = run[0].call if run else None
    works: list[Item] = [HostWork(kind, call, fitted(seconds)) for kind, seconds in host.items()]
    return [*works, _together(run)] if run else works


def _together(run: list[Work]) -> Work:
    first = replace(run[0], launch=NOTHING)
    if len(run) == 1:
        return first
    kernels = tuple(Kernel(work.name, work.kind, work.operators, work.call, work.duration) for work in run)
    return replace(first, name=f"{first.name} and {len(run) - 1} more", operators=(), duration=None, kernels=kernels)
