"""The section ``memory`` of ``python -m lab.validate``: predictions of published peaks of GPU memory, and
whether steps that ran are predicted to fit and batches that failed are not.

* Steps of language models (:mod:`lab.steps.training`): each ran, some tell their peak.
* Megatron-LM's own functional tests on 8 A100 (``megatron_golden/a100.csv.gz``): the most that was in use on the last
  rank, which writes the log. Settings are those of the case's ``model_config.yaml``: attention written out
  (``--attention-backend unfused``), dropout, FP32 gradients, words of GPT-2 padded to a multiple of 128 for each rank
  of ``tp``. A case that was recorded several times has two levels, 0.16 GB of every layer apart: with and without the
  scores of attention; the settings of
  today are the higher one. Resumed runs repeat a job.
* torchtune's table of options (``scripts/published.csv``): Llama 3.2 3B in pure BF16 on one A100.
* timm's results: the batch that ran, and the next larger one that its ``benchmark.py`` had tried before, which failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.process import usable_cores
from e2e.parallelism.spec import ParallelSpec
from e2e.step.memory_room import Verdict, memory_room, verdict
from lab.command_line import show_progress
from lab.data.data_folder import csv_rows
from lab.data.selection import is_sealed
from lab.data.timm_steps import TimmStep, timm_files
from lab.steps.training import (
    KINDS_FILE,
    TRAINING_FILE,
    AskedStep,
    TrainingRow,
    asked_step,
    read_held_out_rows,
    read_kinds_rows,
    read_training_rows,
)
from lab.steps.training_runs import answers_folder, prepared
from lab.validate.errors import print_left_out, section_console

if TYPE_CHECKING:
    from e2e.sources.prepared_step import PreparedStep


GIB = 2**30
GOLDEN_FILE = "megatron_golden/a100.csv.gz"
SCRIPTS_FILE = "scripts/published.csv"


@dataclass(frozen=True)
class AskedMemory:
    """Step whose memory is predicted."""

    name: str
    source: str
    step: AskedStep | TimmStep
    # True if the step ran.
    ran: bool = True
    # Published bytes of the peak, with and without the allocator's cache; 0 if unknown.
    reserved: float = 0.0
    allocated: float = 0.0
    # Published for the last rank, not for the fullest one.
    last: bool = False


@dataclass(frozen=True)
class FoundMemory:
    """Predicted bytes of a step and whether they fit; ``failure``: reason for a missing prediction."""

    reserved: int = 0
    allocated: int = 0
    room: int = 0
    said: Verdict = "not known"
    failure: str | None = None


@dataclass(frozen=True)
class MemoryCase:
    """Memory of a step, published and predicted."""

    asked: AskedMemory
    found: FoundMemory

    @property
    def error(self) -> float | None:
        """(predicted - published) / published of the peak in use if published, else of the reserved peak; ``None``
        without either.
        """
        asked, found = self.asked, self.found
        if asked.allocated:
            return found.allocated / asked.allocated - 1.0
        return found.reserved / asked.reserved - 1.0 if asked.reserved else None

    @property
    def wrong(self) -> bool:
        """True if a step that ran is predicted not to fit, or one that failed is predicted to fit."""
        return self.found.said == ("does not fit" if self.asked.ran else "fits")


@dataclass(frozen=True)
class MemorySection:
    """All cases, and the reasons for skipped ones by name."""

    cases: Sequence[MemoryCase]
    left_out: dict[str, str]

    def figures(self) -> list[dict[str, Any]]:
        """Figures by source, and of all: steps that ran and number of them refused, failed batches and number of them
        accepted, peaks and their errors.
        """
        sources = dict.fromkeys(case.asked.source for case in self.cases)
        groups = [(name, [case for case in self.cases if case.asked.source == name]) for name in sources]
        return [_figures(name, cases) for name, cases in [*groups, ("all", list(self.cases))]]

    def record(self) -> dict[str, Any]:
        """JSON document of the section."""
        rows = [
            {
                "case": case.asked.name, "source": case.asked.source, "ran": case.asked.ran, "error": case.error,
                "published_reserved": case.asked.reserved, "published_allocated": case.asked.allocated,
                **asdict(case.found), "wrong": case.wrong,
            }
            for case in self.cases
        ]  # fmt: skip
        return {"figures": self.figures(), "cases": rows, "left_out": self.left_out}

    def render(self) -> None:
        """Print published peaks, wrong verdicts, and the figures of each source."""
        console = section_console(160)
        table = Table("step", "published GiB", "predicted GiB", "error", "room GiB", "", box=None)
        for case in self.cases:
            asked, found = case.asked, case.found
            if case.error is None and not case.wrong:
                continue
            told = asked.allocated or asked.reserved
            here = found.allocated if asked.allocated or not asked.reserved else found.reserved
            error = "" if case.error is None else f"{case.error:+.1%}"
            said = f"{found.said}, but it {'ran' if asked.ran else 'did not'}" if case.wrong else ""
            room = f"{found.room / GIB:.1f}"
            table.add_row(asked.name, f"{told / GIB:.2f}" if told else "", f"{here / GIB:.2f}", error, room, said)
        console.print(table)
        heads = ("source", "ran", "said not to fit", "failed", "said to fit", "peaks", "mean error", "p90", "bias")
        table = Table(*heads, box=None)
        for each in self.figures():
            errors = ["" if each[name] is None else f"{each[name]:.1%}" for name in ("mean", "p90", "bias")]
            counts = (str(each[name]) for name in ("ran", "refused", "did_not_run", "passed", "peaks"))
            table.add_row(each["source"], *counts, *errors)
        console.print(table)
        console.print(
            "development error: rows were looked at while memory was modelled; sealed rows are not among them",
            soft_wrap=True,
        )
        print_left_out(console, self.left_out)


def _figures(name: str, cases: Sequence[MemoryCase]) -> dict[str, Any]:
    errors = np.array([case.error for case in cases if case.error is not None])
    ran = [case for case in cases if case.asked.ran]
    others = [case for case in cases if not case.asked.ran]
    sizes = np.abs(errors)
    return {
        "source": name,
        "ran": len(ran),
        "refused": sum(case.wrong for case in ran),
        "did_not_run": len(others),
        "passed": sum(case.wrong for case in others),
        "peaks": len(errors),
        "mean": float(sizes.mean()) if len(errors) else None,
        "p90": float(np.quantile(sizes, 0.9)) if len(errors) else None,
        "bias": float(errors.mean()) if len(errors) else None,
    }


def memory_section(data: Path, only: str = "") -> MemorySection | None:
    """Section of every step whose name contains ``only``; ``None`` if there is none."""
    from e2e.sweeps.worker_process import each_in_processes

    asked, left_out = asked_memory(data)
    asked = [each for each in asked if only in each.name]
    if not asked:
        return None
    tasks = {place: (each, answers_folder()) for place, each in enumerate(asked)}
    answers: dict[int, FoundMemory] = {}
    for place, answer in each_in_processes(_found, tasks, usable_cores()):
        answers[place] = answer
        show_progress(len(answers), len(tasks), asked[place].name)
    died = FoundMemory(failure="its process died, most likely for lack of memory")
    cases = []
    for place, each in enumerate(asked):
        found = answers.get(place, died)
        if found.failure is None:
            cases.append(MemoryCase(each, found))
        else:
            left_out[each.name] = found.failure
    return MemorySection(cases, {name: why for name, why in left_out.items() if only in name})


def asked_memory(data: Path) -> tuple[list[AskedMemory], dict[str, str]]:
    """Steps to predict, and the reasons for skipped ones by name."""
    left_out: dict[str, str] = {}
    found: list[AskedMemory] = []
    rows = read_held_out_rows()
    rows += read_training_rows(data) if (data / TRAINING_FILE).exists() else []
    rows += read_kinds_rows(data) if (data / KINDS_FILE).exists() else []
    for row in rows:
        name, step = f"{row.gpu}/{row.name}", asked_step(row)
        if isinstance(step, str):
            left_out[name] = step
        else:
            peaks = row.memory_gib * GIB, row.allocated_gib * GIB
            found.append(AskedMemory(name, row.family, step, True, *peaks))
    for read in (golden_memory, torchtune_memory, timm_memory):
        more, why = read(data)
        found += more
        left_out |= why
    return found, left_out


def _found(task: tuple[AskedMemory, Path]) -> FoundMemory:
    asked, kept = task
    try:
        step = prepared(asked.step, kept) if isinstance(asked.step, AskedStep) else _timm_step(asked.step)
    except (ProjectError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as reason:
        return FoundMemory(failure=f"{reason}".partition("\n")[0] or type(reason).__name__)
    usages = [step.memory[each] for each in sorted(step.memory)]
    full = usages[-1] if asked.last else max(usages, key=lambda usage: usage.peak_bytes)
    room = memory_room(step.setting.machine, step.graph, step.cluster)
    most = max(usage.allocated_bytes for usage in usages)
    return FoundMemory(full.peak_bytes, full.allocated_bytes, room, verdict(most, room))


# --- Megatron-LM's functional tests ------------------------------------------------------------------
_GPUS = 8
_WORDS = 50257
# Parts of a case's name that identify a setting, and those that do not affect the peak memory.
_TOLD = (
    "uniform_full_recompute", "dist_optimizer", "sequence_parallel", r"vp(\d+)", r"(?:tp|pp|cp)\d+", "te",
    "overlap_grad_reduce", "param_gather", "no_mmap_bin_files", "nondeterministic", "dp_last", "decoupled_lr",
    "calculate_per_token_loss", "ddp_average_in_collective", "no_create_attention_mask_in_dataloader",
    "persistent_ckpt", "disable_bias_linear", "tunable_overlap",
)  # fmt: skip
_CASE = re.compile(rf"gpt/gpt3_mcore(?:_(?:{'|'.join(_TOLD)}))+$")


def golden_memory(data: Path) -> tuple[list[AskedMemory], dict[str, str]]:
    """Unsealed cases of Megatron-LM's GPT tests, each once, and the reasons for skipped ones."""
    found: dict[str, AskedMemory] = {}
    left_out: dict[str, str] = {}
    for cells in _published(data / GOLDEN_FILE):
        case = cells["case"]
        name = f"dgx-a100/megatron-golden/{case}"
        if is_sealed(GOLDEN_FILE, cells) or not cells["mem_max_bytes"]:
            continue
        if "resume" in case:
            left_out[name] = "a resumed run repeats a job"
        elif not _CASE.match(case):
            left_out[name] = "a test of Megatron-LM with settings or a model that `--parallel` does not have"
        else:
            peak = float(cells["mem_max_bytes"])
            if name not in found or peak > found[name].allocated:
                found[name] = AskedMemory(name, "Megatron-LM", _golden_step(case, cells), allocated=peak, last=True)
    return list(found.values()), left_out


def _golden_step(case: str, cells: dict[str, str]) -> AskedStep:
    def number(name: str) -> int:
        return int(float(cells[name] or 1))

    tp, pp, cp, layers = number("tp"), number("pp"), number("cp"), number("layers")
    length, micro, replicas = number("seq"), number("mbs"), _GPUS // (tp * pp * cp)
    shares = "dist_optimizer" in case and replicas * cp > 1
    spec = ParallelSpec(
        dp=1 if shares else replicas, fsdp=replicas if shares else 1, tp=tp, pp=pp, cp=cp,
        zero=1 if shares else None, master_weights=True, reduce_dtype="float32",
        sequence_parallel="sequence_parallel" in case,
        micro_batches=number("gbs") // (micro * replicas), recompute="full" if "full_recompute" in case else "none",
        context_form="ring" if cp > 1 else "gather",
    )  # fmt: skip
    virtual = re.search(r"vp(\d+)", case)
    if virtual and pp > 1:
        spec = replace(spec, schedule="interleaved", virtual_stages=layers // pp // int(virtual[1]))
    words = 128 * tp
    config = {
        "n_embd": number("hidden"), "n_layer": layers, "n_head": number("heads"), "n_positions": length,
        "vocab_size": math.ceil(_WORDS / words) * words,
    }  # fmt: skip
    row = TrainingRow(
        0, "Megatron-LM", "test", "gpt2", "dgx-a100", _GPUS, number("gbs"), micro, length, tp, pp, cp, 0, 0, "", "",
        "bf16", False, float(cells["median_iteration_s"] or 0), 0.0, case, held_out=True,
    )  # fmt: skip
    return AskedStep(row, "gpt2", config, micro, length, spec, "megatron-lm")


# --- torchtune ---------------------------------------------------------------------------------------

# meta-llama/Llama-3.2-3B as changes to Llama 3.1 8B.
_LLAMA_3B = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "tie_word_embeddings": True,
}  # fmt: skip
_TUNE = "Llama 3.2 3B bs2 seq4096 bf16: [+ {}]"
_FROM_THERE = ("Packed Dataset", "Compile", "Chunked Cross Entropy", "Activation Checkpointing")


def torchtune_memory(data: Path) -> tuple[list[AskedMemory], dict[str, str]]:
    """Rows of torchtune's table whose options `predict` supports."""
    found: list[AskedMemory] = []
    left_out: dict[str, str] = {}
    rows = [_TUNE.format(name) for name in _FROM_THERE]
    for cells in _published(data / SCRIPTS_FILE):
        name = f"{cells['gpu']}/{cells['repo']}/{cells['config']}"
        if is_sealed(SCRIPTS_FILE, cells) or not cells["peak_mem"]:
            continue
        if cells["config"] not in rows:
            left_out[name] = "a published script with lengths, states or weights that are not told or not modelled"
            continue
        option = rows.index(cells["config"])
        spec = ParallelSpec(master_weights=False, recompute="full" if option >= 3 else "none")
        row = TrainingRow(
            0, "pytorch/torchtune", "sft", "llama-3.2-3b", "a100-sxm-80gb", 1, 2, 2, 4096, 0, 0, 0, 0, 0, "", "",
            "bf16", option >= 1, 0.0, 0.0, "", held_out=True,
        )  # fmt: skip
        stack = "liger" if option >= 2 else "huggingface"
        step = AskedStep(row, "llama-3.1-8b", _LLAMA_3B, 2, 4096, spec, stack, compiled=option >= 1)
        found.append(AskedMemory(name, "torchtune", step, reserved=float(cells["peak_mem"].split()[0]) * GIB))
    return found, left_out


# --- timm --------------------------------------------------------------------------------------------
def timm_memory(data: Path) -> tuple[list[AskedMemory], dict[str, str]]:
    """Steps of median time of every family and file, as they ran, and with the batch tried before."""
    from lab.steps.image_steps import all_steps, middle_steps

    if not timm_files(data):
        return [], {}
    try:
        steps = all_steps(data)
    except InputError as reason:
        return [], {"timm": str(reason)}
    first: dict[tuple[str, str, int], int] = {}
    for step in steps:
        place = step.machine, step.group, step.version
        first[place] = max(first.get(place, 0), step.batch)
    found = []
    for step in middle_steps([step for step in steps if not step.compiled])[::4]:
        most = first[step.machine, step.group, step.version]
        found.append(AskedMemory(step.name, "timm", step))
        if step.batch < most:
            tried = replace(step, batch=tried_before(step.batch, most))
            found.append(AskedMemory(f"{tried.name} (failed)", "timm", tried, ran=False))
    return found, {}


def tried_before(batch: int, first: int) -> int:
    """Batch after which timm's ``benchmark.py`` tries ``batch``, starting with ``first`` (``decay_batch_step``: halves,
    and one step between two of them).
    """
    tried = first
    while (following := _smaller(tried)) > batch:
        tried = following
    return tried


def _smaller(batch: int) -> int:
    base = 1 << ((batch - 1).bit_length() - 1)
    step = max(base // 2, 1)
    return base + (batch - base - 1) // step * step


def _timm_step(step: TimmStep) -> PreparedStep:
    from lab.steps.image_steps import timm_request

    return timm_request(step).prepare()


def _published(path: Path) -> list[dict[str, str]]:
    """Rows of a table; empty if it is absent."""
    return csv_rows(path, "a table of published runs") if path.exists() else []
