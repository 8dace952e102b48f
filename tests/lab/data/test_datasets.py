from __future__ import annotations

import gzip

import numpy as np
import pytest

from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, Gemm, Normalization
from costmodel.operators.layers import Conv2d
from lab.data import aiconfigurator, profiled_kernels
from lab.data.aiconfigurator import read_attention
from lab.data.data_folder import data_folder
from lab.data.kernel_table import KernelTable, counted_only, sample, split_of

DATA = data_folder()
needs_data = pytest.mark.skipif(not (DATA / "neusight").exists(), reason=f"{DATA}: no public GPU measurements")


def write(directory, operator, header, *rows, gpu="Tesla T4"):
    path = directory / "neusight" / "op_latency" / operator / f"{gpu}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join([header, *rows]) + "\n")
    return path


def test_the_contraction_of_a_product_is_column_n(tmp_path):
    rows = ["0.05,2,3,5,7"] * 3
    bmm = profiled_kernels.read_latencies(write(tmp_path, "bmm", "Latency,B,M,N,K", *rows))
    assert bmm.operators[0] == Gemm(2, 3, 7, 5) and bmm.machine == "t4"
    linear = profiled_kernels.read_latencies(write(tmp_path, "linear", "Latency,B,M,N,K", *rows))
    assert linear.operators[0] == Gemm(1, 6, 7, 5, transpose_b=True, bias=True)


def test_other_operators(tmp_path):
    header = "Latency,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding"
    conv = profiled_kernels.read_latencies(write(tmp_path, "conv", header, "1.0,8,16,32,3,28,2,1"))
    assert conv.operators[0] == Conv2d(8, 16, 28, 28, 32, (3, 3), (2, 2), (1, 1, 1, 1))
    for name, operator in (("add", Elementwise("add", 12, 2)), ("ln", Normalization("layer_norm", 3, 4))):
        assert profiled_kernels.read_latencies(write(tmp_path, name, "Latency,B,H", "1.0,3,4")).operators[0] == operator


def test_half_the_host_floor_is_taken_off_and_rows_near_it_do_not_count(tmp_path):
    latency = [0.08] * 200 + [0.09, 0.159, 0.161, 1.04]
    table = profiled_kernels.read_latencies(write(tmp_path, "add", "Latency,B,H", *(f"{each},3,4" for each in latency)))
    assert table.seconds[-1] == pytest.approx(1.0e-3)  # 1.04 ms less half of 0.08 ms
    assert np.flatnonzero(table.counted).tolist() == [202, 203]  # from twice the floor on
    low = profiled_kernels.read_latencies(
        write(tmp_path, "mul", "Latency,B,H", *(f"{each},3,4" for each in [0.02] * 200 + [0.09, 0.2]))
    )
    assert np.flatnonzero(low.counted).tolist() == [201]  # never below 0.1 ms


def test_the_floor_of_convolutions_grows_with_the_row(tmp_path):
    # every tenth convolution takes 1 us, the others 10 ms; the host adds 0.1 ms and 0.1 us more for each row before
    header = "Latency,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding"
    host = 0.1 + 1e-4 * np.arange(2000)
    kernel = np.where(np.arange(2000) % 10 == 0, 1e-3, 10.0)
    rows = [f"{h + k},8,16,{1 + place},3,28,1,1" for place, (h, k) in enumerate(zip(host, kernel, strict=True))]
    table = profiled_kernels.read_latencies(write(tmp_path, "conv", header, *rows))
    assert (table.counted == (kernel > 1)).all()
    # 0.9 of the floor is taken off, a tenth of it stays
    left = table.seconds[table.counted] - 1e-3 * kernel[table.counted]
    assert left == pytest.approx(1e-4 * host[table.counted], abs=1e-5)


def test_only_bf16_products_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"gemm_dtype": ["bfloat16", "fp8"], "m": [2, 2], "n": [3, 3], "k": [5, 5], "latency": [0.25, 0.5]}
    path = tmp_path / "aiconfigurator" / "l40s" / "gemm" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(columns), path)
    (table,) = aiconfigurator.read_aiconfigurator(tmp_path)
    assert table.operators == (Gemm(1, 2, 3, 5, "bfloat16", transpose_b=True),)
    assert table.machine == "l40s" and table.seconds.tolist() == [0.25e-3]


def test_products_that_something_disturbed_do_not_count():
    """A grid of 3 x 3 x 3 sizes at 100 TFLOP/s, above 50 us: one took three times as long, one half as long again."""
    sizes = np.array([2048, 4096, 8192])
    m, n, k = (each.ravel() for each in np.meshgrid(sizes, sizes, sizes, indexing="ij"))
    seconds = 2.0 * m * n * k / 1e14
    middle = np.flatnonzero((m == 4096) & (n == 4096) & (k == 4096))[0]
    corner = np.flatnonzero((m == 8192) & (n == 8192) & (k == 8192))[0]
    assert not aiconfigurator.disturbed(m, n, k, seconds).any()
    slower = seconds.copy()
    slower[[middle, corner]] *= [3.0, 1.5]
    assert np.flatnonzero(aiconfigurator.disturbed(m, n, k, slower)).tolist() == [middle]
    slower[corner] *= 2.0  # three neighbours are too few to tell
    assert np.flatnonzero(aiconfigurator.disturbed(m, n, k, slower)).tolist() == [middle]
    assert not aiconfigurator.disturbed(m, n, k, slower * 1e-3).any()  # a microsecond says little of the rate


def attention_table(folder, system: str, **columns: list[object]):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = "encoder" if "num_key_value_heads" not in columns else "context"
    place = "encoder_attention" if kind == "encoder" else "attention"
    path = folder / "aiconfigurator" / system / place / "vllm" / "1.0" / f"{kind}_attention_perf.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(columns), path)


def test_attention_of_kernels_that_training_has(tmp_path):
    attention_table(
        tmp_path,
        "l40s",
        kernel_source=["vllm_flash_attn_fa2", "vllm_flash_attn_fa2", "torch_flow", "vllm_flash_attn_fa2"],
        attn_dtype=["bfloat16"] * 4,
        kv_cache_dtype=["bfloat16", "bfloat16", "bfloat16", "fp8"],
        batch_size=[2, 3, 2, 2],
        isl=[512, 1, 512, 512],
        step=[0, 1023, 0, 0],
        num_heads=[8] * 4,
        num_key_value_heads=[2] * 4,
        head_dim=[128] * 4,
        window_size=[0, 128, 0, 0],
        latency=[0.5, 0.25, 9.0, 9.0],
    )
    paged, decode = read_attention(tmp_path)
    same = {"causal": True, "dtype": "bfloat16", "kernel": "flash2", "paged": True}
    assert (paged.name, paged.machine, paged.seconds.tolist()) == ("flash2-paged", "l40s", [0.5e-3])
    assert paged.operators == (Attention(2, 8, 512, 512, 128, 2, **same),)
    assert decode.name == "flash2-decode" and decode.operators == (
        Attention(3, 8, 1, 1024, 128, 2, window=128, **same),
    )


def test_attention_of_encoders_sees_everything(tmp_path):
    columns = {"kernel_source": ["vllm_vit_flash_attn_fa3"], "attn_dtype": ["bfloat16"], "batch_size": [2]}
    attention_table(tmp_path, "h100_sxm", isl=[256], num_heads=[4], head_dim=[64], latency=[1.0], **columns)
    (table,) = read_attention(tmp_path)
    assert table.name == "flash3-encoder"
    assert table.operators == (Attention(2, 4, 256, 256, 64, 4, dtype="bfloat16", kernel="flash3"),)


def test_splits_keep_their_shares_and_their_rows():
    splits = [split_of(Gemm(1, m, 7, 9)) for m in range(4000)]
    shares = {name: splits.count(name) / 4000 for name in ("fit", "select", "report")}
    assert shares["fit"] == pytest.approx(0.7, abs=0.03)
    assert shares["select"] == pytest.approx(0.15, abs=0.03) and shares["report"] == pytest.approx(0.15, abs=0.03)
    assert split_of(Gemm(1, 2, 3, 4)) == split_of(Gemm(1, 2, 3, 4))


def test_samples_are_spread_evenly():
    operators = tuple(Elementwise("add", size) for size in range(1, 101))
    counted = np.arange(100) % 2 == 0
    table = KernelTable("add", "t4", operators, np.arange(1.0, 101.0), counted, "here")
    assert sample(table, 3).seconds.tolist() == [1, 50, 100]
    assert sample(table, 1000) is table
    assert [len(each.operators) for each in counted_only([table, table.only(~counted)])] == [50]


@needs_data
def test_the_real_tables_are_complete():
    tables = list(profiled_kernels.read_neusight(DATA))
    assert len(tables) == 55 and sum(len(each.operators) for each in tables) == 212_759
    assert all((each.seconds[each.counted] > 0).all() for each in tables)
