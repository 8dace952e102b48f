"""Operations on the tile registers of AMX, as LLVM IR functions linked into the modules of kernels that call them.

See also :mod:`schedules.contract.vector_operations`. There are eight tiles of up to 16 rows of 64 bytes. A kernel
configures the shape of each, then a product ``C += A B`` takes a tile of sums (rows x 16 of 32 bits), one of data (rows
x groups of neighbours) and one of weights (a row for each group: 16 outputs x neighbours). Natively each function is
one instruction; tile numbers are part of its name, since instructions have no run-time tile operands. The emulation
keeps the tiles in ``state``, a buffer of the kernel's task, of which native code only reads the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TILES = 8
TILE_ROWS = 16
ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * ROW_BYTES
# Layout of ``state``: the tiles, then the configuration in the format of the CPU.
CONFIGURATION_BYTES = 64
STATE_BYTES = TILES * TILE_BYTES + CONFIGURATION_BYTES
_CONFIGURATION = TILES * TILE_BYTES
_COLUMNS_AT, _ROWS_AT = 16, 48
# Entry among the dtypes of a kernel's vector operations if it uses tiles.
TILE_ATTRIBUTE = "tiles"
_INSTRUCTIONS = {"bfloat16": "tdpbf16ps", "int8": "tdpbusd"}


@dataclass(frozen=True)
class TileNumbers:
    """Tile numbers of a block of ``row_tiles`` x ``out_blocks`` sums and its operands.

    ``order``: (row tile, output block) in the order of multiplication; an operand is loaded before its first product.
    """

    row_tiles: int
    out_blocks: int

    def sums(self, row_tile: int, out_block: int) -> int:
        """Index of the tile register that holds these sums."""
        return row_tile * self.out_blocks + out_block

    def data(self, row_tile: int) -> int:
        """Number of a tile of data; with one output block, tiles of data alternate between three registers."""
        if self.out_blocks == 1 and self.row_tiles > 1:
            return 5 + row_tile % 3
        return 4 + row_tile

    def weights(self, out_block: int) -> int:
        """Number of a tile of weights; with one tile of data they alternate likewise."""
        if self.row_tiles == 1:
            return 5 + out_block % 3
        return 4 if self.out_blocks == 1 else 6 + out_block

    @property
    def order(self) -> list[tuple[int, int]]:
        """Order of the products: consecutive ones add to different tiles."""
        return [(row, block) for row in range(self.row_tiles) for block in range(self.out_blocks)]


# Supported blocks of sums: four tiles of sums hide the latency of a product, and two by two need the fewest loads.
TILE_BLOCKS = ((2, 2), (1, 4), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1))


def _products() -> list[tuple[int, int, int]]:
    """(sums, data, weights) of all products that occur in a block."""
    found = set()
    for rows, outs in TILE_BLOCKS:
        numbers = TileNumbers(rows, outs)
        found |= {(numbers.sums(r, o), numbers.data(r), numbers.weights(o)) for r, o in numbers.order}
    return sorted(found)


def tile_configuration(numbers: TileNumbers, rows: int, depth_bytes: int) -> list[int]:
    """Tile configuration of a block as 16 words of 32 bits: ``rows`` of data and sums, with ``depth_bytes`` of data
    each.

    Raises ``ValueError`` if a tile cannot hold that.
    """
    if not 1 <= rows <= TILE_ROWS or not 4 <= depth_bytes <= ROW_BYTES or depth_bytes % 4:
        most = f"at most {TILE_ROWS} rows of {ROW_BYTES} bytes, in words"
        raise ValueError(f"tiles of {rows} rows of {depth_bytes} bytes: {most}")
    raw = bytearray(CONFIGURATION_BYTES)
    raw[0] = 1  # the palette of eight tiles of 1 KiB
    shapes: dict[int, tuple[int, int]] = {}
    for row_tile, out_block in numbers.order:
        shapes[numbers.sums(row_tile, out_block)] = rows, ROW_BYTES
        shapes[numbers.data(row_tile)] = rows, depth_bytes
        shapes[numbers.weights(out_block)] = depth_bytes // 4, ROW_BYTES
    for tile, (tile_rows, row_bytes) in shapes.items():
        at = _COLUMNS_AT + 2 * tile
        raw[at : at + 2] = row_bytes.to_bytes(2, "little")
        raw[_ROWS_AT + tile] = tile_rows
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, CONFIGURATION_BYTES, 4)]


# Function names in TIR. All take the address of ``state`` first; loads and stores also the address of the first row and
# the row stride in bytes.
CONFIGURE, RELEASE = "fusion_tiles_configure", "fusion_tiles_release"


def zero_symbol(tile: int) -> str:
    """Name of the function that sets a tile to zero."""
    return f"fusion_tile_zero_{tile}"


def load_symbol(tile: int) -> str:
    """Name of the function that reads a tile."""
    return f"fusion_tile_load_{tile}"


def store_symbol(tile: int) -> str:
    """Name of the function that writes a tile."""
    return f"fusion_tile_store_{tile}"


def product_symbol(dtype: str, sums: int, data: int, weights: int) -> str:
    """Name of the function that adds a product of two tiles of ``dtype`` to a third.

    For ``int8`` data are unsigned and weights signed.
    """
    return f"fusion_tile_{_INSTRUCTIONS[dtype]}_{sums}_{data}_{weights}"


def tile_definitions(emulated: bool) -> str:
    """LLVM IR of all tile functions: the CPU's instructions, or ``emulated`` in plain arithmetic."""
    if emulated:
        return _EMULATION + "\n".join(_emulated_functions()) + "\n"
    return "\n".join([*_native_functions(), _NATIVE_DECLARED]) + "\n"


def _function(name: str, parameters: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"define void @{name}({parameters}) {{\nstart:\n{body}\n  ret void\n}}"


_MOVES = "ptr %state, ptr %address, i32 %stride"


def _native_functions() -> list[str]:
    wide = "%wide = sext i32 %stride to i64"
    place = f"%configuration = getelementptr i8, ptr %state, i64 {_CONFIGURATION}"
    configure = [place, "call void @llvm.x86.ldtilecfg(ptr %configuration)"]
    found = [
        _function(CONFIGURE, "ptr %state", configure),
        _function(RELEASE, "ptr %state", ["call void @llvm.x86.tilerelease()"]),
    ]
    for tile in range(TILES):
        load = f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr %address, i64 %wide)"
        store = f"call void @llvm.x86.tilestored64(i8 {tile}, ptr %address, i64 %wide)"
        found += [
            _function(zero_symbol(tile), "ptr %state", [f"call void @llvm.x86.tilezero(i8 {tile})"]),
            _function(load_symbol(tile), _MOVES, [wide, load]),
            _function(store_symbol(tile), _MOVES, [wide, store]),
        ]
    for dtype, instruction in _INSTRUCTIONS.items():
        for sums, data, weights in _products():
            call = f"call void @llvm.x86.{instruction}(i8 {sums}, i8 {data}, i8 {weights})"
            found.append(_function(product_symbol(dtype, sums, data, weights), "ptr %state", [call]))
    return found


_NATIVE_DECLARED = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbusd(i8 immarg, i8 immarg, i8 immarg)
"""


def _emulated_functions() -> list[str]:
    found = [
        _function(CONFIGURE, "ptr %state", ["call void @fusion_emulated_configure(ptr %state)"]),
        _function(RELEASE, "ptr %state", ["call void @fusion_emulated_release(ptr %state)"]),
    ]
    for tile in range(TILES):
        moved = f"ptr %state, i64 {tile}, ptr %address, i32 %stride"
        found += [
            _function(zero_symbol(tile), "ptr %state", [f"call void @fusion_emulated_zero(ptr %state, i64 {tile})"]),
            _function(load_symbol(tile), _MOVES, [f"call void @fusion_emulated_load({moved})"]),
            _function(store_symbol(tile), _MOVES, [f"call void @fusion_emulated_store({moved})"]),
        ]
    for dtype, instruction in _INSTRUCTIONS.items():
        for sums, data, weights in _products():
            call = f"call void @fusion_emulated_{instruction}(ptr %state, i64 {sums}, i64 {data}, i64 {weights})"
            found.append(_function(product_symbol(dtype, sums, data, weights), "ptr %state", [call]))
    return found


def _checked(condition: str, good: str) -> str:
    """Trap unless ``condition`` holds, like the exception of the CPU."""
    return f"""  br i1 {condition}, label %{good}, label %wrong
wrong:
  call void @llvm.trap()
  unreachable
{good}:"""


# Product of one row of data with one of weights; the surrounding loops are common to all products.
_PRODUCTS = {
    "tdpbf16ps": """
  %x0.up = shl i32 %x, 16
  %w0.up = shl i32 %w, 16
  %x1.up = and i32 %x, -65536
  %w1.up = and i32 %w, -65536
  %x0 = bitcast i32 %x0.up to float
  %w0 = bitcast i32 %w0.up to float
  %x1 = bitcast i32 %x1.up to float
  %w1 = bitcast i32 %w1.up to float
  %before = load float, ptr %sum.at, align 4
  %p0 = fmul float %x0, %w0
  %s0 = fadd float %before, %p0
  %p1 = fmul float %x1, %w1
  %after = fadd float %s0, %p1
  store float %after, ptr %sum.at, align 4""",
    "tdpbusd": "\n  %s0 = load i32, ptr %sum.at, align 4"
    + "".join(
        f"""
  %xu{byte} = shl i32 %x, {24 - 8 * byte}
  %x{byte} = lshr i32 %xu{byte}, 24
  %wu{byte} = shl i32 %w, {24 - 8 * byte}
  %w{byte} = ashr i32 %wu{byte}, 24
  %p{byte} = mul i32 %x{byte}, %w{byte}
  %s{byte + 1} = add i32 %s{byte}, %p{byte}"""
        for byte in range(4)
    )
    + "\n  store i32 %s4, ptr %sum.at, align 4",
}


def _emulated_product(instruction: str) -> str:
    """LLVM IR of an emulated product; shapes must match, and every tile must be configured."""
    return f"""
define void @fusion_emulated_{instruction}(ptr %state, i64 %sums, i64 %data, i64 %weights) {{
start:
  %rows = call i64 @fusion_emulated_rows(ptr %state, i64 %sums)
  %row.bytes = call i64 @fusion_emulated_bytes(ptr %state, i64 %sums)
  %data.rows = call i64 @fusion_emulated_rows(ptr %state, i64 %data)
  %data.bytes = call i64 @fusion_emulated_bytes(ptr %state, i64 %data)
  %weight.rows = call i64 @fusion_emulated_rows(ptr %state, i64 %weights)
  %weight.bytes = call i64 @fusion_emulated_bytes(ptr %state, i64 %weights)
  %groups = lshr i64 %data.bytes, 2
  %columns = lshr i64 %row.bytes, 2
  %same.rows = icmp eq i64 %rows, %data.rows
  %same.groups = icmp eq i64 %groups, %weight.rows
  %same.columns = icmp eq i64 %row.bytes, %weight.bytes
  %some = icmp ne i64 %rows, 0
  %fit0 = and i1 %same.rows, %same.groups
  %fit1 = and i1 %same.columns, %some
  %fit = and i1 %fit0, %fit1
{_checked("%fit", "fits")}
  %sum.base = call ptr @fusion_emulated_tile(ptr %state, i64 %sums)
  %data.base = call ptr @fusion_emulated_tile(ptr %state, i64 %data)
  %weight.base = call ptr @fusion_emulated_tile(ptr %state, i64 %weights)
  br label %row
row:
  %r = phi i64 [ 0, %fits ], [ %r.next, %row.end ]
  %r.at = mul i64 %r, {ROW_BYTES}
  %sum.row = getelementptr i8, ptr %sum.base, i64 %r.at
  %data.row = getelementptr i8, ptr %data.base, i64 %r.at
  br label %group
group:
  %g = phi i64 [ 0, %row ], [ %g.next, %group.end ]
  %x.at = getelementptr i32, ptr %data.row, i64 %g
  %x = load i32, ptr %x.at, align 1
  %g.at = mul i64 %g, {ROW_BYTES}
  %weight.row = getelementptr i8, ptr %weight.base, i64 %g.at
  br label %column
column:
  %c = phi i64 [ 0, %group ], [ %c.next, %column ]
  %w.at = getelementptr i32, ptr %weight.row, i64 %c
  %w = load i32, ptr %w.at, align 1
  %sum.at = getelementptr i32, ptr %sum.row, i64 %c{_PRODUCTS[instruction]}
  %c.next = add i64 %c, 1
  %c.more = icmp ult i64 %c.next, %columns
  br i1 %c.more, label %column, label %group.end
group.end:
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, %groups
  br i1 %g.more, label %group, label %row.end
row.end:
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %rows
  br i1 %r.more, label %row, label %done
done:
  ret void
}}
"""


def _emulated_move(name: str, copy: str, clear: str) -> str:
    """LLVM IR of an emulated load or store; ``copy``: arguments that copy one row between ``%inside`` and
    ``%outside``.
    """
    return f"""
define void @fusion_emulated_{name}(ptr %state, i64 %tile, ptr %address, i32 %stride) {{
start:
  %rows = call i64 @fusion_emulated_rows(ptr %state, i64 %tile)
  %bytes = call i64 @fusion_emulated_bytes(ptr %state, i64 %tile)
  %wide = sext i32 %stride to i64
  %some = icmp ne i64 %rows, 0
{_checked("%some", "fits")}
  %base = call ptr @fusion_emulated_tile(ptr %state, i64 %tile){clear}
  br label %row
row:
  %r = phi i64 [ 0, %fits ], [ %r.next, %row ]
  %r.at = mul i64 %r, {ROW_BYTES}
  %inside = getelementptr i8, ptr %base, i64 %r.at
  %r.out = mul i64 %r, %wide
  %outside = getelementptr i8, ptr %address, i64 %r.out
  call void @llvm.memcpy.p0.p0.i64({copy}, i64 %bytes, i1 false)
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %rows
  br i1 %r.more, label %row, label %done
done:
  ret void
}}
"""


_CLEAR = f"\n  call void @llvm.memset.p0.i64(ptr %base, i8 0, i64 {TILE_BYTES}, i1 false)"
_EMULATION = f"""
define ptr @fusion_emulated_tile(ptr %state, i64 %tile) {{
  %at = mul i64 %tile, {TILE_BYTES}
  %base = getelementptr i8, ptr %state, i64 %at
  ret ptr %base
}}
define i64 @fusion_emulated_rows(ptr %state, i64 %tile) {{
  %at = add i64 %tile, {_CONFIGURATION + _ROWS_AT}
  %place = getelementptr i8, ptr %state, i64 %at
  %short = load i8, ptr %place, align 1
  %rows = zext i8 %short to i64
  ret i64 %rows
}}
define i64 @fusion_emulated_bytes(ptr %state, i64 %tile) {{
  %twice = mul i64 %tile, 2
  %at = add i64 %twice, {_CONFIGURATION + _COLUMNS_AT}
  %place = getelementptr i8, ptr %state, i64 %at
  %short = load i16, ptr %place, align 1
  %bytes = zext i16 %short to i64
  ret i64 %bytes
}}
define void @fusion_emulated_zero(ptr %state, i64 %tile) {{
start:
  %rows = call i64 @fusion_emulated_rows(ptr %state, i64 %tile)
  %some = icmp ne i64 %rows, 0
{_checked("%some", "fits")}
  %base = call ptr @fusion_emulated_tile(ptr %state, i64 %tile){_CLEAR}
  ret void
}}
define void @fusion_emulated_configure(ptr %state) {{
start:
  %place = getelementptr i8, ptr %state, i64 {_CONFIGURATION}
  %palette = load i8, ptr %place, align 1
  %known = icmp eq i8 %palette, 1
{_checked("%known", "fits")}
  call void @llvm.memset.p0.i64(ptr %state, i8 0, i64 {_CONFIGURATION}, i1 false)
  ret void
}}
define void @fusion_emulated_release(ptr %state) {{
  call void @llvm.memset.p0.i64(ptr %state, i8 0, i64 {STATE_BYTES}, i1 false)
  ret void
}}
{_emulated_move("load", "ptr %inside, ptr %outside", _CLEAR)}
{_emulated_move("store", "ptr %outside, ptr %inside", "")}
{_emulated_product("tdpbf16ps")}
{_emulated_product("tdpbusd")}
declare void @llvm.trap()
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)
"""
