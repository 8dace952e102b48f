"""The section ``serving`` of ``python -m lab.validate``: language models as they are served, against measured rows.

* ``serving/silicon.csv.gz``: mean TTFT and TPOT of whole runs (InferenceX, NVIDIA). Rows whose time to the first token
  is waiting for room (``queueing``) and speculative ones do not count. Groups are GPU x engine x model.
* ``serving/splitwise.csv.gz``: times of prompts and tokens of fixed batches, vLLM of 2023.
* ``serving/argonne.csv.gz``: seconds of whole fixed batches, engines of 2024.
* ``serving/gpt_fast.csv.gz``: tokens per second of one sequence.

Constants of engines that are fitted to whole rows are those of ``engines.yaml``; for ``left out`` figures they are
fitted anew (:mod:`lab.validate.engine_times`) without the rows of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from costmodel.base.errors import ProjectError
from e2e.serving.serving_request import ServingRequest
from lab.command_line import with_progress
from lab.data.data_folder import csv_rows
from lab.validate.errors import section_console

if TYPE_CHECKING:
    from e2e.serving.serving_answer import ServingAnswer

FOLDER = "serving"
_CONFIGS = {
    "Llama-3.1-8B-Instruct": "llama-3.1-8b", "Qwen3-32B": "qwen3-32b", "DeepSeek-R1": "deepseek-r1",
    "gpt-oss-120b": "gpt-oss-120b", "Qwen3-235B-A22B-FP8": "qwen3-235b", "Llama-3.1-70B": "llama-3.1-70b",
    "llama2-70b": "llama-2-70b", "Llama-2-7b-hf": "llama-2-7b", "Meta-Llama-3-8B": "llama-3.1-8b",
    "Mistral-7B-v0.1": "mistral-7b", "Llama-2-7B": "llama-2-7b", "Llama-2-70B": "llama-2-70b",
    "Llama-3.1-8B": "llama-3.1-8b",
}  # fmt: skip
_WEIGHTS = {"fp8_block": "fp8-block", "fp16": "bf16", "int8_wo": "int8", "int4_wo_g32": "int4"}

# What InferenceX' scripts start engines with (``benchmarks/dsr1_fp8_h200.sh``, ``gptoss_fp4_h200_trt_slurm.sh``).
_RECIPES = {
    ("inferencex", "sglang", "DeepSeek-R1"): "token-budget=32768,stream=10",
    ("inferencex", "trtllm", "gpt-oss-120b"): "token-budget=20000",
}


@dataclass(frozen=True)
class MeasuredServing:
    """One measured row. ``measured``: seconds by name (``tpot``, ``ttft``), or ``throughput`` in tokens per second."""

    group: str
    name: str
    request: ServingRequest
    measured: Mapping[str, float]
    counts: bool = True


def read_silicon(data: Path) -> list[MeasuredServing]:
    """Rows of whole runs."""
    path = data / FOLDER / "silicon.csv.gz"
    found = []
    for row in csv_rows(path, "serving rows"):
        precision = f"weights={_weights(row['weights'])},experts={_weights(row['expert_weights'])}"
        if row["model"] == "DeepSeek-R1":
            precision = "weights=fp8-block,experts=fp8-block"
        if row["engine"] == "trtllm" and row["weights"].startswith("fp8"):
            precision += ",kv=fp8"
        if row["engine"] == "vllm" and row["model"] == "Llama-3.1-70B":
            precision += ",kv=fp8"  # kv-cache-dtype of vLLM's recipes that InferenceX follows
        concurrency, version = int(row["concurrency"]), row["engine_version"]
        tp, ep = _ranks(row)
        recipe = _RECIPES.get((row["source"], row["engine"], row["model"]), "")
        request = ServingRequest(
            gpu=row["gpu"],
            model_config=_config(data, row["model"]),
            gpus=tp,
            engine_options=recipe,
            parallel=f"tp={tp},ep={ep},dp-attention={row['attention_dp']}",
            engine=row["engine"] + (f"={version}" if version[:1].isdigit() else ""),
            precision=precision,
            input_length=int(row["isl_tokens"]),
            output_length=int(row["osl_tokens"]),
            shortest_length=float(row["shortest_length_ratio"]),
            concurrency=concurrency,
        )
        ttft, tpot = float(row["ttft_mean_ms"]) / 1e3, float(row["tpot_mean_ms"]) / 1e3
        mean = request.output_length * (1 + request.shortest_length) / 2
        throughput = concurrency * mean / (ttft + (mean - 1) * tpot)
        measured = {"tpot": tpot, "ttft": ttft, "throughput": throughput}
        counts = "queueing" not in row["flags"] and row["speculative"] == "none"
        group = f"{row['gpu']}/{row['engine']}/{row['model']}"
        found.append(MeasuredServing(group, row["row"], request, measured, counts))
    return found


def _ranks(row: Mapping[str, str]) -> tuple[int, int]:
    """Ranks of tensor and of expert parallelism.

    InferenceX ran gpt-oss on TensorRT-LLM with ``--ep_size=$TP`` (``benchmarks/gptoss_fp4_h200_trt_slurm.sh``). Its
    records until November 2025 say ep 1; those of ``tp2_ep2`` have the product of both for tp: they took 2 GPUs, by
    times that equal those of ``tp2_ep1`` to 1 %.
    """
    tp, ep = int(row["tp"]), int(row["ep"])
    if (row["source"], row["engine"], row["model"]) != ("inferencex", "trtllm", "gpt-oss-120b"):
        return tp, ep
    tp = ep if ep > 1 else tp
    return tp, tp


def read_fixed(data: Path) -> list[MeasuredServing]:
    """Rows of fixed batches: Splitwise, Argonne and gpt-fast; those of models without a configuration are left out."""
    found = []
    for row in csv_rows(data / FOLDER / "splitwise.csv.gz", "fixed batches"):
        measured = {"prompt": float(row["prompt_ms"]) / 1e3, "token": float(row["token_ms"]) / 1e3}
        found.append(_fixed(data, "splitwise", row, measured, "vllm=0.2"))
    for row in csv_rows(data / FOLDER / "argonne.csv.gz", "fixed batches"):
        if row["model"] in _CONFIGS:
            engine = {"vllm": "vllm=0.4", "trtllm": "trtllm=0.9"}[row["engine"]]
            found.append(_fixed(data, "argonne", row, {"batch": float(row["latency_s"])}, engine))
    for row in csv_rows(data / FOLDER / "gpt_fast.csv.gz", "single sequences"):
        if row["model"] in _CONFIGS:
            row = {**row, "gpu": "a100-sxm-80gb", "prompt_tokens": "5"}
            found.append(_fixed(data, "gpt-fast", row, {"token": 1 / float(row["tokens_s"])}, "gpt-fast"))
    return found


def _fixed(
    data: Path, source: str, row: Mapping[str, str], measured: Mapping[str, float], engine: str
) -> MeasuredServing:
    batch = int(row["batch"])
    request = ServingRequest(
        gpu=row["gpu"],
        model_config=_config(data, row["model"]),
        gpus=int(row["tp"]),
        engine=engine,
        precision=f"weights={_weights(row['weights'])},activations=bf16",
        input_length=int(row["prompt_tokens"]),
        output_length=int(row["output_tokens"]),
        concurrency=batch,
        requests=batch,
        # Others than Splitwise call the engine within its process.
        engine_options="" if source == "splitwise" else "server=0 s",
    )
    name = f"{row['model']} tp{row['tp']} {row['prompt_tokens']}+{row['output_tokens']} x {batch}"
    return MeasuredServing(f"{source}/{row['gpu']}/{engine.split('=')[0]}", name, request, measured)


def _config(data: Path, model: str) -> Path:
    return data / FOLDER / "configs" / f"{_CONFIGS[model]}.json"


def _weights(name: str) -> str:
    return _WEIGHTS.get(name, name)


@dataclass(frozen=True)
class ServingError:
    """One row and what was predicted, by the names of ``row.measured``; ``inside``: the interval holds the measured."""

    row: MeasuredServing
    predicted: Mapping[str, float]
    inside: Mapping[str, bool]

    def error(self, name: str) -> float:
        """Signed relative error."""
        return self.predicted[name] / self.row.measured[name] - 1


Predict = Callable[[MeasuredServing], tuple[Mapping[str, float], Mapping[str, tuple[float, float]]]]


def errors_of(rows: Iterable[MeasuredServing], predict: Predict) -> tuple[list[ServingError], list[str]]:
    """Errors of ``rows`` as ``predict`` answers them, and the reasons of those that it refuses."""
    found, refused = [], []
    for row in rows:
        try:
            predicted, intervals = predict(row)
        except ProjectError as error:
            refused.append(f"{row.name}: {error}")
            continue
        inside = {
            name: intervals[name][0] <= value <= intervals[name][1]
            for name, value in row.measured.items()
            if name in intervals
        }
        found.append(ServingError(row, predicted, inside))
    return found, refused


# Prices of the deployments that were asked about.
_TABLES: dict[tuple[Any, ...], Any] = {}


def answered(row: MeasuredServing) -> ServingAnswer:
    """Answer of ``e2e serve``."""
    from e2e.serving.serving_answer import serve

    asked = row.request
    key = (
        asked.gpu,
        asked.model,
        asked.model_config,
        asked.gpus,
        asked.parallel,
        asked.engine,
        asked.precision,
        asked.routing,
    )
    return serve(asked, _TABLES.setdefault(key, {}))


def quantities(answer: ServingAnswer) -> dict[str, float]:
    """An answer in the quantities that were measured."""
    ttft, tpot = float(answer.ttft_seconds.mean()), float(answer.tpot_seconds.mean())
    outputs = float(answer.workload.outputs.mean())
    return {
        "ttft": ttft,
        "tpot": tpot,
        "throughput": (answer.request.concurrency or 1) * outputs / (ttft + (outputs - 1) * tpot),
        "prompt": float((answer.run.first - answer.run.sent).max()),
        "token": tpot,
        "batch": float(answer.run.last.max()),
    }


def predicted(row: MeasuredServing) -> tuple[Mapping[str, float], Mapping[str, tuple[float, float]]]:
    """What ``e2e serve`` predicts of the measured quantities, and intervals of some."""
    answer = answered(row)
    values = quantities(answer)
    if row.request.requests is not None:
        return values, {}  # seconds of single batches, not means of runs
    from e2e.serving.serving_result import serving_result

    found = serving_result(answer, with_table_error=False)
    return values, {"ttft": found.ttft_interval_seconds, "tpot": found.tpot_interval_seconds}


@dataclass(frozen=True)
class ServingSection:
    """Errors of the section."""

    errors: Sequence[ServingError]
    refused: Sequence[str]

    def record(self) -> dict[str, Any]:
        """JSON-able content."""
        return {
            "refused": list(self.refused),
            "groups": {
                group: {name: _statistics(found, name) for name in found[0].row.measured}
                for group, found in self._groups().items()
            },
            "rows": [
                {"group": each.row.group, "name": each.row.name, "measured": dict(each.row.measured),
                 "predicted": {name: each.predicted[name] for name in each.row.measured}}
                for each in self.errors
            ],
        }  # fmt: skip

    def _groups(self) -> dict[str, list[ServingError]]:
        counted = [each for each in self.errors if each.row.counts]
        runs = [each for each in counted if "ttft" in each.row.measured]
        found: dict[str, list[ServingError]] = {"all runs": runs} if runs else {}
        for each in counted:
            found.setdefault(each.row.group, []).append(each)
        return found

    def render(self) -> None:
        """Print the errors of each group."""
        table = Table(
            title="serving: errors in %, median / 90th percentile (bias, share inside the 80 % interval)",
            title_justify="left",
        )
        for column in ("group", "rows", "", "", ""):
            table.add_column(column)
        for group, found in self._groups().items():
            cells = [_cell(found, name) for name in found[0].row.measured]
            table.add_row(group, str(len(found)), *cells)
        console = section_console()
        console.print(table)
        for reason in self.refused[:10]:
            console.print(f"refused: {reason}")


def _statistics(found: Sequence[ServingError], name: str) -> dict[str, float]:
    signed = np.array([each.error(name) for each in found if name in each.row.measured])
    return {
        "count": len(signed),
        "mean": float(np.abs(signed).mean()),
        "median": float(np.median(np.abs(signed))),
        "p90": float(np.quantile(np.abs(signed), 0.9)),
        "bias": float(signed.mean()),
        "inside": float(np.mean([each.inside[name] for each in found if name in each.inside] or [False])),
    }


def _cell(found: Sequence[ServingError], name: str) -> str:
    told = _statistics(found, name)
    inside = f", {100 * told['inside']:.0f} in" if name in found[0].inside else ""
    return f"{name} {100 * told['median']:.1f} / {100 * told['p90']:.1f} ({100 * told['bias']:+.1f}{inside})"


def serving_section(data: Path, only: str = "") -> ServingSection | None:
    """The section over the rows whose GPU/engine/model contains ``only``; ``None`` without any."""
    if not (data / FOLDER / "silicon.csv.gz").exists():
        return None
    rows = [each for each in (*read_silicon(data), *read_fixed(data)) if only in f"{each.group}/{each.name}"]
    if not rows:
        return None
    return ServingSection(*errors_of(with_progress(rows, lambda row: row.name), predicted))
