"""Command lines with values that options cannot have, or whose files are not what is asked for, by program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.option_inputs import array_files, networks, outputs, paths, user_of

NO_COUNTS = ("0", "-1", "1.5", "abc", "", "²", "٣", str(10**30), "9" * 5000)
NO_NUMBERS = ("nan", "inf", "-1", "abc", "", "1e400")
CPU = ("--machine", "xeon-amx-2c")


@dataclass(frozen=True)
class OptionCase:
    """``words``: the program and what it is given; ``user``: whose rights it has, ``None`` for those of who asks."""

    words: tuple[str, ...]
    user: int | None = None


def _unlike(cases: Iterable[OptionCase]) -> list[OptionCase]:
    """Each once: several options are given the same values."""
    return list(dict.fromkeys(cases))


def _case(*words: object) -> OptionCase:
    texts = tuple(map(str, words))
    return OptionCase(texts, user_of(texts))


def _each(base: Sequence[object], option: str, values: Iterable[object]) -> Iterator[OptionCase]:
    for value in values:
        yield _case(*base, option, value)


# --- fusion ---------------------------------------------------------------------------------------

SHAPES = (
    ("", "=", "x", "x=", "=1", "x=0,3,16,16", "x=-1,3", "x=²,3,16,16", "x=٣,3,16,16", "x=1,3,16", "x=1,3,16,16")
    + ("x=1,3,99,99", "nope=1", "x=1,,3", "x=1,3,9999999999,9999999999", "x=1x3x16x16", "x=1.5", "x=1,5,16,16")
    + ("x=" + "9" * 5000, "x=" + "1," * 5000 + "1")
)  # fmt: skip
TARGETS = (
    ("llvm", "llvm -mcpu=nope", "llvm -mcpu=znver4", "llvm -mcpu=znver4 -num-cores 0", "cuda", "{}")
    + ("llvm -mcpu=znver4 -num-cores ²", "llvm -mcpu=znver4 -num-cores 99999999", "llvm -mtriple=aarch64")
    + ("llvm -mcpu=znver4 -num-cores 8 --bad",)
)  # fmt: skip
TRACKERS = (
    ("", "x", "x:y", "localhost:0", "localhost:99999", "localhost:²", "localhost:9", ":9", "localhost:")
    + ("nosuchhost.invalid:9190",)
)  # fmt: skip
PRECISIONS = ("", "nope", "FLOAT32", "int8", "bfloat16", "auto", "float16", "float99")
NO_ENGINES = ("", "nope", ",", "onnxruntime,onnxruntime", "onnxruntime,", "ONNXRUNTIME")


def fusion_cases(place: Path) -> list[OptionCase]:
    """Of ``python -m fusion``; ``place``: where the inputs are, and ``build``, which a first run has left."""
    return _unlike([*_tuned(place), *_analyzed(place), *_quantized(place), *_built(place), *_recorded(place)])


def _tuned(place: Path) -> Iterator[OptionCase]:
    model, output = place / "m.onnx", ("-o", place / "tuned", "--trials", 1)
    tune = ("tune", model, *output, "--minutes", 0.02)
    for path in [*paths(place, "onnx"), *networks(place), place / "tiny.json", place / "x.npz"]:
        yield _case("tune", path, *output, "--minutes", 0.01)
    for option in ("--trials", "--threads", "--batch"):
        yield from _each(tune, option, NO_COUNTS)
    yield from _each(("tune", model, *output), "--minutes", (*NO_NUMBERS, 0))
    yield from _each((*tune, "--precision", "auto"), "--max-error", (*NO_NUMBERS, 0))
    yield from _each(tune, "--shape", SHAPES)
    yield _case(*tune, "--batch", 1, "--batch", 1)
    yield _case(*tune, "--shape", "x=1,3,16,16", "--batch", 3)
    for option in ("--machine", "--target"):
        yield from _each(tune, option, ("", "nope", "t4", "dgx-h100", *paths(place, "yaml")))
    yield from _each(tune, "--target", TARGETS)
    yield from _each((*tune, "--key", "k"), "--tracker", TRACKERS)
    yield from (_case(*tune, "--key", "x"), _case(*tune, "--tracker", "localhost:9"))
    yield _case(*tune, "--tracker", "localhost:9", "--key", "")
    yield _case(*tune, "--tracker", "localhost:9", "--key", "k", "--target", "llvm -mcpu=znver4")
    yield from _each(tune, "--precision", PRECISIONS)
    samples = [*paths(place, "npz"), *array_files(place), place / "samples.npz"]
    yield from _each((*tune, "--precision", "int8"), "--calibration", samples)
    yield from _each(tune, "--against", NO_ENGINES[:3])
    yield from _each((*tune, "--against", "openvino-int8"), "--quantized", paths(place, "onnx"))
    yield from _each(tune, "--quantized", paths(place, "onnx"))
    for folder in [place / "tiny.json", place / "unwritable" / "x", place / "tiny.json" / "x", *_NO_FOLDERS]:
        yield _case("tune", model, "-o", folder, "--trials", 1, "--minutes", 0.02)
    yield from (_case("tune"), _case("tune", model))


_NO_FOLDERS = ("/proc/x", "/dev/null", "", "x" * 300, "/dev/full")


def _analyzed(place: Path) -> Iterator[OptionCase]:
    model, opened = place / "m.onnx", place / "open.onnx"
    for path in [*paths(place, "onnx"), *networks(place), place / "tiny.json", place / "x.npz"]:
        yield _case("analyze", path, *CPU)
    for option in ("--batch", "--threads"):
        yield from _each(("analyze", model, *CPU), option, NO_COUNTS)
    for path in (model, opened):
        yield from _each(("analyze", path, *CPU), "--shape", SHAPES)
    yield _case("analyze", opened, *CPU, "--shape", "x=1,3,16,16", "--shape", "x=2,3,16,16")
    yield from _each(("analyze", opened, *CPU), "--shape", ("x=1,3,1,1", "x=100000,3,5000,5000"))
    yield from _each(("analyze", model), "--machine", ("", "nope", "t4", "dgx-h100", *paths(place, "yaml")))
    yield from _each(("analyze", model, *CPU), "--precision", PRECISIONS)
    yield from _each(("analyze", model, *CPU), "--picture", (*outputs(place, "svg"), "x.txt"))
    yield _case("analyze", model, model)


def _quantized(place: Path) -> Iterator[OptionCase]:
    model, output = place / "m.onnx", ("-o", place / "quantized.onnx")
    for path in [*paths(place, "onnx"), *networks(place), place / "tiny.json", place / "x.npz"]:
        yield _case("quantize", path, "--random", *output)
    yield from _each(("quantize", place / "open.onnx", "--random", *output), "--shape", SHAPES)
    samples = [*paths(place, "npz"), *array_files(place), place / "samples.npz"]
    yield from _each(("quantize", model, *output), "--calibration", samples)
    yield from _each(("quantize", model, "--random"), "-o", (*outputs(place, "onnx"), model))
    yield from (_case("quantize", model), _case("quantize", model, "--random", "--calibration", samples[-1]))
    for option, value in (("--format", "x"), ("--method", "x"), ("--exclude", "nope"), ("--exclude", "")):
        yield _case("quantize", model, "--random", option, value, *output)


def _no_builds(place: Path) -> list[str]:
    inside = [str(place / each) for each in ("empty-folder", "tiny.json", "folder")]
    return ["missing", *inside, "", "/dev/null", "x" * 300, "ø☃"]


def _built(place: Path) -> Iterator[OptionCase]:
    build, given = place / "build", ("--input", place / "x.npz")
    written = ("--output", place / "y.npz")
    for path in _no_builds(place):
        yield from (_case("report", path), _case("benchmark", path), _case("compare", path))
        yield _case("run", path, *given, *written)
    yield from _each(("run", build, *written), "--input", [*paths(place, "npz"), *array_files(place)])
    yield from _each(("run", build, *written), "--input", (place / "samples.npz", place / "x.npz"))
    yield from _each(("run", build, *given), "--output", [*outputs(place, "npz"), place / "x.npz" / "y"])
    for value in (*NO_COUNTS, 2, 999):
        yield _case("run", build, *given, *written, "--threads", value)
        yield _case("benchmark", build, "--seconds", 0.1, "--streams", value)
        yield _case("benchmark", build, "--seconds", 0.1, "--threads", value)
    yield from _each(("benchmark", build), "--seconds", (*NO_NUMBERS, 0))
    yield from _each(("compare", build), "--against", ("", "nope", *NO_ENGINES[2:]))
    compare = ("compare", build, "--against", "onnxruntime")
    yield from _each(compare, "--model", paths(place, "onnx")[:6])
    yield from _each(("compare", build, "--against", "onnxruntime-int8"), "--quantized", paths(place, "onnx")[:6])
    yield from _each(compare, "--data", [*paths(place, "npz"), *array_files(place)])
    for option in ("--cold", "--trials"):
        yield from _each(compare, option, NO_COUNTS[:5])
    yield from (_case("report", build), _case(), _case("doctor", "x"), _case("nosuch"))


def _recorded(place: Path) -> Iterator[OptionCase]:
    model, build, folder = place / "m.onnx", place / "build", ("--directory", place / "records")
    for path in [*paths(place, "onnx"), *networks(place), place / "tiny.json", place / "x.npz"]:
        yield _case("records", "measure", path, "-o", place / "measured", "--minutes", 0)
    for path in [place / "tiny.json", place / "unwritable" / "x", place / "tiny.json" / "x", *_NO_FOLDERS]:
        yield _case("records", "measure", model, "-o", path, "--minutes", 0)
    for path in _no_builds(place):
        yield _case("records", "measure", path, "--minutes", 0)
        yield _case("records", "collect", path, *folder)
        yield from (_case("records", "train", "--directory", path), _case("records", "evaluate", "--directory", path))
    for value in ("0", "1", "abc", 10**30):
        yield _case("records", "measure", build, "--configurations", value, "--minutes", 0)
        yield _case("records", "collect", build, "--rows", value, *folder)
    yield from _each(("records", "measure", build), "--minutes", ("nan", "inf", "-1", "abc"))
    yield _case("records", "collect", build, "--leave-out", "../x", *folder)
    yield _case("records", "collect", build, "--directory", place / "tiny.json")
    yield _case("records", "train", "--leave-out", "nope")
    yield _case("records", "train", "--leave-out", "nope", "--output", place / "trained")
    yield from (_case("records", "collect"), _case("records"))


# --- e2e ------------------------------------------------------------------------------------------

PARALLEL = (
    ("", "=", "dp", "dp=", "dp=0", "dp=-1", "dp=²", "dp=٣", "dp=1.5", "dp=2,dp=2", "tp=3", "xx=2", "dp=2,", ",dp=2")
    + ("dp=2;tp=1", "dp = 2", "DP=2", "bucket-mb=nan,dp=2", "bucket-mb=inf,dp=2", "bucket-mb=1e-300,dp=2")
    + ("bucket-mb=-1", "offload-optimizer=nan,dp=2", "offload-optimizer=2", "recompute=maybe", "pp=2", "cp=2", "ep=2")
    + ("micro-batches=999999999,dp=2", "dp=2,micro-batches=1000000", "prefetch=0,fsdp=2", "prefetch=1000000,fsdp=2")
    + ("first-layers=5,pp=2", "ep=2,dp=2", "tp=2", "recompute-every=1000,recompute=full,dp=2", "virtual-stages=3")
    + ("offload-layers=99,dp=2", "dp=" + "9" * 5000, "dp=2," * 2000 + "tp=1", "ø=2")
)  # fmt: skip
SKEWS = (
    ("", "spread", "spread=", "spread=nan", "spread=inf", "spread=-1", "spread=1e308", "spread=1e6", "jitter=nan")
    + ("jitter=1e200", "seed=-1", "seed=1.5", "seed=" + "9" * 22, "seed=²", "start=0", "start=0:", "start=0:nan")
    + ("start=0:inf", "start=0:1e308", "start=99:1", "start=-1:1", "start=x:1", "start=0:-5", "start=0:1,start=0:2")
    + ("spread=0.1,spread=0.2", "x=1", "spread=0.02;jitter=1", "seed=1e400")
)  # fmt: skip
QUESTIONS = (
    ("", "+", "batch", "batch=", "batch=0", "batch=-1", "batch=²", "batch=٣", "batch=1.5", "batch=4:8", "batch=0:4")
    + ("batch=" + "9" * 30, "batch=" + "9" * 5000, "kernels:gemm", "kernels:=2x", "kernels:gemm=0x", "host=/dev/null")
    + ("kernels:gemm=nanx", "kernels:gemm=-1x", "kernels:[=2x", "kernels:nosuch=2x", "kernels:(a+)+$=2x", "host=0x")
    + ("kernels:gemm=1e308x", "kernels:gemm=1e-308x", "host=.x", "host=1.2.3x", "host=nope", "host=", "host=nan")
    + ("host=1e3x", "host=inf", "bucket-mb=0", "bucket-mb=50", "stream:add=x", "stream:add=²", "stream:add=99999")
    + ("stream:=1", "stream:add", "fuse:", "fuse:[", "fuse:nosuch", "batch-embeddings", "batch-embeddingsx", "x=1")
    + ("batch=2+batch=3", "host=2x+host=2x", "batch=8+", "ø", "batch=2" * 500)
)  # fmt: skip
NETWORKS = (
    ("", "x", ":", "infiniband-ndr:", "infiniband-ndr:0", "infiniband-ndr:-1", "infiniband-ndr:²", "infiniband-ndr:٣")
    + ("infiniband-ndr:x", "infiniband-ndr:999999999999", ":4", "nope:4", "infiniband-ndr:1:2", "t4")
)  # fmt: skip
GPUS = ("", "t5", "h100", "nope", "..", "/", "T4", "t4 ", "dgx-h100", "t4,t4", "infiniband-ndr", "x" * 5000, "ø")
PRICES = (*NO_NUMBERS, "0", "2.49.1", "$2", "2,49", "1e308", "1e-320", "missing.yaml", "price.json")
ROUTINGS = (
    ("power-law=nan", "capacity=0.000001", "power-law=1e300", "capacity=1e300")
    + ("balanced,power-law=1.2,power-law=1.3", "", "x")
)  # fmt: skip
WORDS = ("", "nonsense", "float99", "ø☃", "TRAIN", "x" * 5000)
# What does not go together, or asks for what a model of one layer does not have.
TOGETHER = (
    ("--compile", "--cuda-graph"), ("--mode", "inference", "--optimizer", "fused"), ("--precision", "fp8-tensorwise"),
    ("--dtype", "float16", "--precision", "fp8-tensorwise"), ("--dtype", "tf32", "--precision", "fp8-tensorwise"),
    ("--lora", 8, "--mode", "inference"), ("--attention", "mla"), ("--attention", "flash3-fp8"),
    ("--stack", "megatron", "--attention", "eager"), ("--stack", "megatron", "--compile"), ("--gpus", 2), ("--advice",),
    ("--layout", "channels_last"), ("--linear-attention", "fused"), ("--ranks", "0"), ("--skew", "spread=0.1"),
    ("--network", "infiniband-ndr"), ("--nodes", 2), ("--document-length", 8, "--mode", "inference"),
    ("--model", "gpt2"),
    ("--document-length", 100, "--sequence-length", 10), ("--retarget", "h100-sxm"), ("--routing", "power-law=1.2"),
    ("--cache-length", 60, "--mode", "inference", "--sequence-length", 10), ("--lora", 10**9), ("--lora", 10**6),
    ("--cache-length", 8, "--mode", "inference"), ("--cache-length", 10**9, "--mode", "inference"),
    ("--document-length", 10**6), ("--batch-size", 10**9), ("--batch-size", 10**15), ("--batch-size", 2**62),
    ("--gpus", 2**40, "--parallel", f"dp={2**40}"), ("--gpus", 10**6, "--parallel", f"fsdp={10**6}"),
    ("--gpus", 64, "--parallel", "tp=64"), ("--gpus", 8, "--nodes", 3, "--parallel", "dp=8"),
)  # fmt: skip


def e2e_cases(place: Path) -> list[OptionCase]:
    """Of ``python -m e2e``; ``place``: where the inputs are."""
    parts = (_predicted(place), _asked(place), _read(place), _swept(place), _sharded(place), _measured(place))
    return _unlike(case for part in parts for case in part)


def _predicted(place: Path) -> Iterator[OptionCase]:
    tiny = ("predict", "--model-config", place / "tiny.json", "--gpu", "t4")
    for option in ("--nodes", "--batch-size", "--sequence-length", "--document-length", "--cache-length", "--lora"):
        yield from _each(tiny, option, (*NO_COUNTS, "1e3", "0x10", "1_000"))
    yield from _each((*tiny, "--parallel", "dp=2"), "--gpus", NO_COUNTS)
    for words in TOGETHER:
        yield _case(*tiny, *words)
    for option in ("--mode", "--dtype", "--attention", "--stack", "--layout", "--moe", "--precision", "--optimizer"):
        yield from _each(tiny, option, WORDS)
    for option in ("--routing", "--linear-attention"):
        yield from _each(tiny, option, WORDS)
    yield from _each(("predict", "--model-config", place / "tiny.json"), "--gpu", GPUS)
    yield from _each((*tiny, "--gpus", 16, "--parallel", "dp=16"), "--network", NETWORKS)
    yield from _each((*tiny, "--gpus", 2), "--parallel", PARALLEL)
    yield from _each((*tiny, "--gpus", 2, "--parallel", "dp=2"), "--skew", SKEWS)
    yield from _each(("predict", "--model-config", place / "mixture.json", "--gpu", "t4"), "--routing", ROUTINGS)


def _asked(place: Path) -> Iterator[OptionCase]:
    tiny = ("predict", "--model-config", place / "tiny.json", "--gpu", "t4")
    yield from _each(tiny, "--what-if", (*QUESTIONS, f"host={place / 'folder'}"))
    yield from _each(tiny, "--price", (*PRICES, place / "price.yaml"))
    yield from _each(tiny, "--report", outputs(place, "html"))
    yield from _each(tiny, "--timeline", (*outputs(place, "json"), place / "t.txt"))
    yield _case(*tiny, "--timeline", place / "same", "--report", place / "same")
    yield _case(*tiny, "--report", place / "tiny.json", "--json")
    for words in ([], ["x"], ["--model"], ["--nosuch"], ["--json", "--json=3", "--model", "gpt2", "--gpu", "t4"]):
        yield _case("predict", *words)
    models = ("", "x" * 5000, "ø☃", "timm/", "timm/nosuch", "GPT2", "../x")
    for model in models:
        yield _case("predict", "--gpu", "t4", "--model", model)
    yield _case("predict", "--gpu", "t4", "--model", "gpt2", "--model", "bert-base")
    for words in ([], ["nosuch"], ["--nosuch"], ["--help"], ["predict", "--help"]):
        yield _case(*words)


def _read(place: Path) -> Iterator[OptionCase]:
    tiny, gpu = ("predict", "--model-config", place / "tiny.json", "--gpu", "t4"), ("predict", "--gpu", "t4")
    spread, two = (*tiny, "--gpus", 16, "--parallel", "dp=16"), (*gpu, "--gpus", 2, "--model", "dlrm")
    for path in paths(place, "json"):
        for option in ("--model-config", "--trace"):
            yield _case(*gpu, option, path)
        yield from (_case("predict", "--kineto", path), _case(*tiny, "--overheads", path))
        yield _case(*two, "--config", place / "tables.yaml", "--sharding", path)
    for path in [*paths(place, "json.gz"), *paths(place, "tar.gz")]:
        yield from (_case(*gpu, "--trace", path), _case("predict", "--kineto", path))
    for path in paths(place, "yaml"):
        yield from (_case(*tiny[:3], "--gpu", path), _case(*tiny, "--price", path), _case(*spread, "--network", path))
        yield _case(*two, "--config", path, "--sharding", place / "plan.json")
        yield _case("shard", "--tables", path, "--gpu", "t4", "--gpus", 2, "-o", place / "plan-out.json")
    for path in paths(place, "py"):
        yield _case(*gpu, "--script", f"{path}:f")
    trace, profile = place / "trace.json", place / "profile.json"
    yield from (_case("predict", "--kineto", trace), _case(*gpu, "--trace", profile), _case(*gpu, "--trace"))
    yield from (_case(*gpu, "--trace", trace, trace), _case(*gpu, "--trace", "["), _case(*gpu, "--trace", "*.nothing"))
    yield _case("predict", "--kineto", profile, "--trace", trace, "--retarget", "nope", "--gpu", "t4")
    for words in (("--trace", trace), ("--kineto", profile), ("--sharding", place / "plan.json")):
        yield _case(*tiny, *words)
    yield _case(*tiny, "--config", place / "tables.yaml")


def _swept(place: Path) -> Iterator[OptionCase]:
    base = ("sweep", "--workers", 1, "-o", place / "swept")
    model, gpu = ("--model", place / "tiny.json"), ("--gpu", "t4")
    gpus, spec = ("--gpus", 2), ("--parallel", "dp=2")
    counts = ("", ",", "8,", "0", "-1", "²", "٣", "1.5", "x", "9" * 5000, "2,2,2", 999999999999)
    yield from _each((*base, *model, *gpu, *spec), "--gpus", counts)
    yield from _each((*base, *model, *gpus, *spec), "--gpu", ("", ",", "t4,", "nope", "t4,t4", "dgx-h100,t4"))
    yield from _each((*base, *model, *gpu, *gpus), "--parallel", ("", "auto,dp=2", "dp=3", "xx", "auto"))
    models = (
        "missing.json",
        "",
        place / "binary.json",
        place / "folder",
        place / "list.json",
        "resnet50",
        "dlrm",
        "no",
    )
    yield from _each((*base, *gpu, *gpus, *spec), "--model", models)
    whole = (*base, *model, *gpu, *gpus, *spec)
    yield from _each((*base, *model, *gpu, *gpus), "--global-batch", (*NO_COUNTS, 10**9))
    yield from _each(whole, "--plot", ("x.txt", "/nonexistent/x.svg", place / "folder.svg", "", "x"))
    yield from _each(whole, "--report", ("/nonexistent/x.html", place / "folder.html", ""))
    for option, value in (
        ("--ray", "nope:99999"), ("--ray", ""), ("--top", 0), ("--batch-size", 0), ("--batch-size", 10**22),
        ("--sequence-length", 99999999999), ("--attention", "x"), ("--network", "x"), ("--workers", 0),
    ):  # fmt: skip
        yield _case(*whole, option, value)
    for folder in (
        "/dev/null",
        place / "tiny.json",
        "/proc/x",
        "",
        place / "unwritable" / "x",
        place / "tiny.json" / "x",
    ):
        yield _case("sweep", "--workers", 1, *model, *gpu, *gpus, *spec, "-o", folder)


def _sharded(place: Path) -> Iterator[OptionCase]:
    tables = ("shard", "--tables", place / "tables.yaml", "--gpu", "t4", "-o", place / "plan-out.json")
    shard = (*tables, "--seconds", 0.5, "--gpus", 2)
    counts = ("0", "-1", "1.5", "", "²", 10**30)
    for option in ("--gpus", "--batch-size", "--seed", "--minimum-columns", "--nodes"):
        yield from _each(shard, option, counts)
    yield from _each(shard, "--gpus", (100000, 10**9))
    for option in ("--reserve", "--seconds"):
        yield from _each(shard, option, (*NO_NUMBERS, 0, 1, 0.99))
    yield from _each(shard, "--kinds", ("", ",", "x", "table-wise,", "table-wise,table-wise", "TABLE-WISE"))
    yield from _each(shard, "--indices", [*paths(place, "npz"), *array_files(place)])
    yield from _each(shard, "-o", outputs(place, "json"))
    yield from _each(shard, "--torchrec", outputs(place, "json"))
    yield _case(*shard, "--torchrec-module", "", "--torchrec", place / "torchrec.json")


def _measured(place: Path) -> Iterator[OptionCase]:
    measure = ("measure", "-o", place / "measured")
    yield from _each(measure, "--device", ("cuda:99", "x", "", "meta"))
    yield from _each((*measure, "--device", "cpu"), "--minutes", (*NO_NUMBERS, 0))
    yield _case("measure", "-o", place / "tiny.json", "--device", "cpu", "--minutes", 0.0001)
    yield from (_case("doctor", "x"), _case("doctor", "--json", "extra"))


CASES: dict[str, Callable[[Path], list[OptionCase]]] = {"fusion": fusion_cases, "e2e": e2e_cases}
