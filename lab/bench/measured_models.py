"""Step times of the built-in models, measured on the GPU at hand: what ``python -m e2e predict`` is compared with.

    python -m lab.bench.measured_models -o OUT [--device cuda:0] [--minutes 8] [--resume]

Each case is timed over many steps without the profiler, with a wait only at the end of a sample, then traced for a few
steps (Kineto). Cases are in order of importance: an interrupted run still has one of each kind.

Models are built by the same code as for the capture, but on a real device instead of the meta device, with weights and
inputs. DLRM runs with ``nn.EmbeddingBag`` tables: the table-batched operator is not part of torch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from costmodel.base.errors import InputError, OutputError, Say
from costmodel.base.process import pass_ending
from costmodel.measure.device import failure_line, open_device, provenance, release_memory
from costmodel.measure.overhead_suite import step_seconds, traced_seconds
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget
from e2e.capture.models import catalog, dlrm, transformer
from e2e.capture.models.configurations import PRESETS
from e2e.step.options import StepOptions
from lab.command_line import program, run


@dataclass(frozen=True)
class ModelCase:
    """Step to measure. ``sequence_length`` 0: the model has no sequences. ``traced``: with a profiled run."""

    model: str
    batch_size: int
    sequence_length: int = 0
    mode: str = "train"
    dtype: str = "float32"
    attention: str = "eager"
    traced: bool = False

    def record(self) -> dict[str, str | int]:
        """Return the columns that identify the case."""
        return {
            "model": self.model,
            "mode": self.mode,
            "dtype": self.dtype,
            "attention": self.attention,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
        }

    def key(self) -> tuple[str, ...]:
        """Return the values of :meth:`record` as a table holds them."""
        return tuple(str(value) for value in self.record().values())

    def name(self) -> str:
        """Return a name for files."""
        return "-".join([self.model, self.mode, self.dtype, self.attention, *map(str, self._sizes())])

    def _sizes(self) -> tuple[int, ...]:
        return (self.batch_size, self.sequence_length) if self.sequence_length else (self.batch_size,)


_WORKLOADS = (
    ("gpt2-large", 4, 1024, True),
    ("resnet-50", 64, 0, True),
    ("dlrm-ddp", 2048, 0, True),
    ("bert-large", 8, 512, True),
    ("opt-1.3b", 2, 1024, False),
    ("inception-v3", 64, 0, False),
    ("llama-3.2-1b", 2, 1024, False),
    ("xlnet-base", 8, 512, False),
    ("dlrm", 512, 0, False),
    ("switch-base-8", 4, 256, False),
    ("gpt3-xl", 1, 1024, False),
    ("gpt2", 1, 128, False),
)
_FORMS = (
    ("train", "float32"),
    ("train", "bfloat16"),
    ("forward-backward", "float32"),
    ("inference", "float32"),
    ("train", "tf32"),
    ("inference", "bfloat16"),
    ("forward-backward", "bfloat16"),
)
CASES = tuple(
    ModelCase(model, batch, length, mode, dtype, traced=traced and (mode, dtype) == ("train", "float32"))
    for mode, dtype in _FORMS
    for model, batch, length, traced in _WORKLOADS
) + tuple(
    ModelCase(model, batch, length, "train", "bfloat16", "flash")
    for model, batch, length, _ in _WORKLOADS
    if length and not model.startswith(("xlnet", "switch"))
)
CPU_CASES = (ModelCase("gpt2", 1, 8, "inference"),)


Forward = Callable[[], torch.Tensor]


def real_step(case: ModelCase, device: Any) -> Callable[[], Any]:
    """Return one step of ``case`` on ``device`` with random weights and data.

    Raises ``InputError`` for unknown models.
    """
    options = StepOptions(mode=case.mode, dtype=case.dtype, attention=case.attention)  # type: ignore[arg-type]
    if case.model in catalog.IMAGES:
        return _images(case, device, options)
    if case.model in dlrm.CONFIGS:
        return _dlrm(case, device, options)
    if case.model in PRESETS:
        return _transformer(case, device, options)
    raise InputError(f"model {case.model!r} has no real step; choose one of {', '.join(catalog.known_models())}")


def _prepared(model: torch.nn.Module, options: StepOptions) -> torch.nn.Module:
    return model.to(catalog.TORCH_DTYPES[options.dtype]).train(options.mode != "inference")


def _images(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    make, side = catalog.IMAGES[case.model]
    with torch.device(device):
        model = _prepared(make(), options)
        pictures = torch.randn((case.batch_size, 3, side, side), dtype=catalog.TORCH_DTYPES[options.dtype])
        labels = torch.randint(1000, (case.batch_size,))
    forward = catalog.classification(model, pictures, labels, options.mode)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)

    return catalog.workload(case.model, model, forward, options, optimizer).step


def _dlrm(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    config = replace(dlrm.CONFIGS[case.model], embedding="bags")
    dtype, lookups = catalog.TORCH_DTYPES[options.dtype], config.lookups
    with torch.device(device):
        model = _prepared(dlrm.Dlrm(config), options)
        dense = torch.randn((case.batch_size, config.bottom[0]), dtype=dtype)
        indices = torch.stack([torch.randint(rows, (case.batch_size * lookups,)) for rows in config.rows])
        offsets = torch.arange(0, case.batch_size * lookups, lookups)
        clicks = torch.rand((case.batch_size, 1)).to(dtype)
    criterion = torch.nn.MSELoss() if config.loss == "mse" else torch.nn.BCELoss()

    def forward() -> torch.Tensor:
        probabilities = model(dense, indices, offsets)
        return probabilities if options.mode == "inference" else criterion(probabilities, clicks)

    step = catalog.workload(case.model, model, forward, options, lambda each: torch.optim.SGD(each, lr=1e-4))
    return step.step


def _transformer(case: ModelCase, device: Any, options: StepOptions) -> Callable[[], Any]:
    attention = "eager" if case.attention == "eager" else "sdpa"
    shape = transformer.build_transformer(PRESETS[case.model], attention, case.model)
    length = transformer.sequence_length(shape.config.to_dict(), case.sequence_length or None, case.model)
    with torch.device(device):
        # Built again: the meta device does not keep the values of buffers such as masks and rotary frequencies.
        model = type(shape)._from_config(shape.config, attn_implementation=attention, dtype=torch.float32)
        model.tie_weights()
        ids = torch.randint(min(model.config.vocab_size, 30000), (case.batch_size, length))
    _prepared(model.to(device), options)
    forward = _on_tokens(model, ids, options.mode != "inference")
    return catalog.workload(case.model, model, forward, options, lambda each: torch.optim.AdamW(each, lr=1e-5)).step


def _on_tokens(model: Any, ids: torch.Tensor, with_loss: bool) -> Forward:
    arguments: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    if with_loss:
        arguments["labels"] = ids
    model.config.use_cache = False

    def run() -> torch.Tensor:
        output = model(**arguments)
        loss = getattr(output, "loss", None) if with_loss else output[0]
        return loss if loss is not None else output[0].float().mean()

    return run


COLUMNS = (
    *("model", "mode", "dtype", "attention", "batch_size", "sequence_length"),
    *("median_s", "minimum_s", "samples", "steps", "profiled_s", "peak_memory_bytes", "trace", "error"),
)
SAMPLES, TRACED_STEPS = 7, 2
_SAMPLE_SECONDS, _MOST_STEPS = 0.5, 50
_SECONDS_OF_A_CASE = 20.0


def measure_models(
    device_name: str,
    output: Path,
    minutes: float,
    resume: bool,
    report: Say,
    cases: tuple[ModelCase, ...] | None = None,
) -> Path:
    """Write ``output/models.csv``, ``.json`` and a trace for every case marked so; return the path of the table.

    A case that does not fit the memory, or that this device cannot run, is a row with an ``error``.
    """
    budget = TimeBudget(minutes)
    device = open_device(device_name)
    chosen = cases or (CASES if device.type == "cuda" else CPU_CASES)
    with Table(output, "models", COLUMNS, provenance(device), resume) as table:
        done = {tuple(row[name] for name in COLUMNS[:6]) for row in table.rows}
        progress = SuiteProgress(budget, report, len(chosen))
        for case in chosen:
            if case.key() not in done and budget.left(_SECONDS_OF_A_CASE if device.type == "cuda" else 0.0):
                table.add(**case.record(), **_row(case, device, output))
            progress.step(case.name())
        report(f"models measured in {budget.elapsed:.0f} s; {table.path}")
    return table.path


def _row(case: ModelCase, device: Any, output: Path) -> dict[str, Any]:
    """Return the row of a case; errors of torch or transformers become its result, and the suite continues."""
    try:
        return _measure(case, device, output)
    except OutputError:
        raise
    except Exception as error:
        pass_ending(error)
        return {"error": failure_line(case.name(), error, device)}
    finally:
        release_memory(device)


def _measure(case: ModelCase, device: Any, output: Path) -> dict[str, Any]:
    import torch

    from costmodel.measure.operator_calls import allow_tf32

    allow_tf32(case.dtype == "tf32")
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = _without_gradients(real_step(case, device)) if case.mode == "inference" else real_step(case, device)
    step_seconds(step, device, 2)
    once = step_seconds(step, device, 2)
    steps = max(min(int(_SAMPLE_SECONDS / once), _MOST_STEPS), 2)
    samples = [step_seconds(step, device, steps) for _ in range(SAMPLES)]
    row: dict[str, Any] = {"samples": SAMPLES, "steps": steps}
    row |= {"median_s": f"{statistics.median(samples):.5e}", "minimum_s": f"{min(samples):.5e}"}
    if device.type == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    if case.traced:
        row["trace"] = f"models-{case.name()}.json.gz"
        row["profiled_s"] = f"{traced_seconds(step, device, TRACED_STEPS, output / row['trace'], shapes=True):.5e}"
    return row


def _without_gradients(step: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    def run() -> Any:
        with torch.no_grad():
            return step()

    return run


def measured_models(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the table and the traces.")],
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the code.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="Time budget; what is measured by then is kept.")] = 8.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the table that -o holds.")] = False,
) -> None:
    """Measure real steps of the built-in models on the GPU at hand."""
    measure_models(device, output, minutes, resume, lambda line: print(line, file=sys.stderr, flush=True))


app = program(measured_models, "stopped; what was measured is kept, --resume continues it")


if __name__ == "__main__":
    sys.exit(run(app, "lab.bench.measured_models"))
