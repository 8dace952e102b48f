"""Whole networks: tunes a model, then times it against every engine a user could take instead, in turns.

    python benchmarks/models.py mobilenet_v2 --minutes 15 -o build/models
    python benchmarks/models.py mobilenet_v1 --minutes 15 --against onnxruntime,openvino,torch,tvm-unfused

A second run goes on from the tuning records of the first; ``--minutes 0`` only measures what is built.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fusion.acceptance.tune_job import TuneRequest
from fusion.commands.tune import tune_model
from fusion.comparing.compare import Comparison, compare_command
from fusion.modelzoo import export
from fusion.search.progress import TuningDisplay

AGAINST = "onnxruntime,openvino,openvino-bf16,torch,torch-eager,tvm-unfused"


def prepare(name: str, directory: Path, minutes: float, trials: int, threads: int) -> Path:
    """The build directory of ``name``, tuned for up to ``minutes``."""
    model, build = directory / f"{name}.onnx", directory / name
    if not model.exists():
        directory.mkdir(parents=True, exist_ok=True)
        export(name, model)
    if minutes > 0:
        with TuningDisplay() as display:
            tune_model(TuneRequest(model, build, trials=trials, minutes=minutes, threads=threads), display)
    return build


def table(name: str, comparison: Comparison) -> str:
    """Markdown, one line per engine."""
    lines = [
        f"| {name} | median ms | min ms | times as long as ours | largest error |",
        "|---|---|---|---|---|",
    ]
    for row in comparison.rows:
        engine = f"{row.engine} ({row.mode})" if row.mode else row.engine
        error = "" if row.max_abs_error is None else f"{row.max_abs_error:.1e}"
        times = f"{row.median_seconds * 1e3:.2f} | {row.min_seconds * 1e3:.2f}"
        lines.append(f"| {engine} | {times} | {row.ratio_to_tuned:.2f} | {error} |")
    lines += [f"| {absent.engine} | {absent.status}: {absent.reason} | | | |" for absent in comparison.not_measured]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="mobilenet_v1, mobilenet_v2, resnet50")
    parser.add_argument("--minutes", type=float, default=15.0, help="of tuning per model")
    parser.add_argument("--trials", type=int, default=128, help="per kernel at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", default=AGAINST, help="engines, separated by commas")
    parser.add_argument("--stock-trials", type=int, default=64, help="of stock MetaSchedule per task")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    for name in arguments.models:
        build = prepare(name, arguments.output, arguments.minutes, arguments.trials, arguments.threads)
        comparison = compare_command(
            build,
            arguments.against.split(","),
            threads=arguments.threads,
            trials_per_task=arguments.stock_trials,
            progress=print,
        )
        print(table(name, comparison), flush=True)
        document = json.dumps(comparison.to_json(), indent=1)
        (arguments.output / f"{name}.json").write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
