"""Reports of a plan: the cheapest setting with the flags to start it, the frontier, a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from costmodel.base.units import format_quantity
from costmodel.machines.cluster import load_gpu
from costmodel.pages.charts import PALETTE, inline_chart, set_logarithmic, set_tip
from costmodel.pages.document import render, write_page
from e2e.serving.deployment import read_parallel, read_precision
from e2e.serving.engines import engine_named
from e2e.serving.serving_answer import model_of
from e2e.serving.serving_plan import PlanRow, ServingPlan

COLUMNS = (
    "GPUs", "engine", "parallel", "precision", "users", "TTFT", "TPOT", "tokens/s/user", "tokens/s/GPU", "sure",
    "in all",
)  # fmt: skip


def plan_record(plan: ServingPlan) -> dict[str, Any]:
    """The document of ``--json``."""
    best = plan.best
    return {
        "request": plan.request.to_json(),
        "best": None if best is None else {**asdict(best), "command": start_command(plan, best)},
        "frontier": [asdict(each) for each in plan.frontier],
        "settings": [asdict(each) for each in plan.rows],
        "refused": plan.refused,
        "stopped": plan.stopped,
    }


def plan_text(plan: ServingPlan) -> str:
    """Lines of text."""
    best, lines = plan.best, []
    if best is None:
        lines.append(f"{_targets(plan)}: no setting holds this with probability {plan.request.probability:g}")
    else:
        lines += [f"cheapest for {_targets(plan)}:", *_table([_cells(best)])]
        lines.append(f"start each copy with: {start_command(plan, best)}")
    others = [next(row for row in plan.rows if row.gpu == gpu and row.copies) for gpu in _gpus(plan)]
    others = [each for each in others if each is not best]
    if others:
        lines += ["", "cheapest of the other GPUs:", *_table([_cells(each) for each in others])]
    lines += ["", "frontier of throughput per GPU against the speed of one user:"]
    lines += _table([_cells(each) for each in plan.frontier])
    if plan.refused:
        lines += ["", f"{len(plan.refused)} deployments are not possible, such as {plan.refused[0]}"]
    return "\n".join(lines)


def _gpus(plan: ServingPlan) -> list[str]:
    return list(dict.fromkeys(row.gpu for row in plan.rows if row.copies))


def _targets(plan: ServingPlan) -> str:
    asked = plan.request
    load = f"{asked.rate:g} requests/s" if asked.rate else f"{asked.concurrency:,} users"
    targets = {"TTFT": asked.ttft, "TPOT": asked.tpot}
    return ", ".join([load, *(f"{name} {format_quantity(value, 's', 3)}" for name, value in targets.items() if value)])


def _cells(row: PlanRow) -> tuple[str, ...]:
    found = "" if row.total_gpus is None else f"{row.copies} x {row.gpus} = {row.total_gpus}"
    return (
        f"{row.gpus} x {row.gpu}", row.engine, row.parallel, row.precision or "as stored", f"{row.concurrency:,}",
        format_quantity(row.ttft_seconds, "s", 3), format_quantity(row.tpot_seconds, "s", 3),
        f"{row.tokens_per_second_per_user:.1f}", f"{row.output_tokens_per_second_per_gpu:,.0f}",
        f"{row.probability:.0%}", found if row.per_hour is None else f"{found}, {row.per_hour:.2f}/h",
    )  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    listed = [COLUMNS, *rows]
    widths = [max(len(row[place]) for row in listed) for place in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]


def start_command(plan: ServingPlan, row: PlanRow) -> str:
    """The command that starts one copy of ``row`` (vLLM 0.11, SGLang 0.5, TensorRT-LLM 1.1)."""
    asked = plan.request
    model, engine = model_of(asked.served(gpu=row.gpu)), engine_named(row.engine)
    name = asked.model or str(asked.model_config.parent if asked.model_config else "")
    way, precision = read_parallel(row.parallel, row.gpus), read_precision(row.precision, model, load_gpu(row.gpu))
    casts = precision.weights.startswith("fp8") and not model.stored
    eight, copies, longest = precision.kv == "fp8", way.attention_dp, asked.input_length + asked.output_length
    if engine.name == "vllm":
        words = [
            f"vllm serve {name} --tensor-parallel-size {way.attention_tp}",
            f"--pipeline-parallel-size {way.pp}" * (way.pp > 1),
            f"--data-parallel-size {copies}" * (copies > 1), "--enable-expert-parallel" * (way.ep > 1),
            "--quantization fp8" * casts, "--kv-cache-dtype fp8" * eight, f"--max-model-len {longest}",
            f"--max-num-seqs {row.concurrency} --max-num-batched-tokens {engine.token_budget}",
            f"--gpu-memory-utilization {engine.memory_share:g}",
        ]  # fmt: skip
    elif engine.name == "sglang":
        words = [
            f"python -m sglang.launch_server --model-path {name} --tp-size {way.tp}",
            f"--pp-size {way.pp}" * (way.pp > 1), f"--dp-size {copies} --enable-dp-attention" * (copies > 1),
            f"--ep-size {way.ep}" * (way.ep > 1),
            "--quantization fp8" * casts, "--kv-cache-dtype fp8_e4m3" * eight, f"--context-length {longest}",
            f"--max-running-requests {row.concurrency} --chunked-prefill-size {engine.token_budget}",
            f"--mem-fraction-static {engine.memory_share:g}",
        ]  # fmt: skip
    else:
        more = ["enable_attention_dp: true"] * (copies > 1) + ["kv_cache_config: {dtype: fp8}"] * eight
        words = [
            f"trtllm-serve {name} --tp_size {way.tp}", f"--pp_size {way.pp}" * (way.pp > 1),
            f"--ep_size {way.ep}" * (way.ep > 1), f"--max_batch_size {row.concurrency} --max_seq_len {longest}",
            f"--max_num_tokens {engine.token_budget} --kv_cache_free_gpu_memory_fraction {engine.memory_share:g}",
            "--extra_llm_api_options more.yaml" * bool(more), f"# more.yaml: {'; '.join(more)}" * bool(more),
            "# from a checkpoint in FP8" * casts,
        ]  # fmt: skip
    return " ".join(filter(None, words))


def write_plan_page(plan: ServingPlan, path: Path) -> None:
    """Write the page; ``OutputError`` if it cannot be written."""
    best, title = plan.best, f"Serving {plan.request.model or plan.request.model_config}"
    page = render(
        "e2e.serving/plan.html",
        title=title,
        answer="No setting holds the targets." if best is None else ", ".join(_cells(best)),
        command="" if best is None else start_command(plan, best),
        question=_targets(plan),
        frontier=inline_chart("Throughput per GPU against the speed of one user", lambda axes: _draw(axes, plan), 5.0),
        columns=COLUMNS,
        surpassing=[_cells(each) for each in plan.frontier],
        settings=[_cells(each) for each in plan.rows],
        refused=[(each,) for each in plan.refused],
    )
    write_page(path, page)


def _draw(axes: Any, plan: ServingPlan) -> None:
    for place, gpu in enumerate(dict.fromkeys(row.gpu for row in plan.rows)):
        rows = [row for row in plan.rows if row.gpu == gpu]
        for row in rows:
            (dot,) = axes.plot(*_place(row), ".", color=PALETTE[place % len(PALETTE)], alpha=0.5)
            set_tip(dot, ", ".join(_cells(row)))
        best = ServingPlan(plan.request, rows).frontier
        axes.plot(*zip(*(_place(row) for row in best), strict=True), color=PALETTE[place % len(PALETTE)], label=gpu)
    set_logarithmic(axes, "xy")
    axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU")
    axes.legend()


def _place(row: PlanRow) -> tuple[float, float]:
    return row.tokens_per_second_per_user, row.output_tokens_per_second_per_gpu
