"""Python API of ``e2e``: :func:`predict`, :func:`serve` and :func:`sweep`, which the command line calls too.

User errors are raised as :class:`costmodel.ProjectError` with a one-line message, which names options as on the command
line (``--batch-size`` is ``batch_size`` here).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from costmodel.base.errors import InputError
from costmodel.base.output_files import check_outputs
from costmodel.base.units import check_count
from costmodel.pages.document import check_page
from e2e.parallelism.spec import ParallelSpec, parse_parallel, text_of
from e2e.step.option_fields import Options, options_of
from e2e.step.options import AttentionForm, Dtype, Precision, instead_of

if TYPE_CHECKING:
    from e2e.explain.prediction import Prediction
    from e2e.serving.serving_plan import PlanProgress, ServingPlan
    from e2e.serving.serving_result import ServingResult
    from e2e.sources.requests import Request
    from e2e.sweeps.sweep_driver import SweepProgress, SweepResult
    from e2e.sweeps.workers import Workers

PathLike = str | os.PathLike[str]
T = TypeVar("T")
# A capture patches PyTorch for the whole process: threads take turns.
_TURN = RLock()


def predict(
    *asked: str | Options,
    price: str | float | PathLike | None = None,
    advice: bool | Callable[[str], object] = False,
    timeline: PathLike | None = None,
    report: PathLike | None = None,
    **options: Any,
) -> Prediction:
    """Predict one steady step of a model on one GPU or many, or replay a recorded run; ``python -m e2e predict``.

    ``options`` are those of the command line (``batch_size`` for ``--batch-size``; ``traces`` and ``tables`` for
    ``--trace`` and ``--config``); the name of a built-in model may be the first argument. Options may be grouped in
    records: :class:`e2e.ClusterOptions`, :class:`e2e.StackOptions`, or a whole request, whose fields are its options:
    :class:`e2e.Model`, :class:`e2e.SpreadModel`, :class:`e2e.Script`, :class:`e2e.ScriptJob`, :class:`e2e.Trace`,
    :class:`e2e.Recording`, :class:`e2e.ShardedTables`. A ``script`` may be the function itself, which is called without
    a GPU (:func:`e2e.capture.script.load_script`); ``parallel`` a text or a :class:`ParallelSpec`.

    ``price``: dollars per GPU and hour, or a YAML file of prices (:mod:`e2e.sources.gpu_prices`). ``advice``: also
    predict other settings and the largest batch; a function is called with lines of progress (Ctrl-C stops the advice
    and keeps its results so far). ``timeline`` and ``report``: files to write (Chrome trace, HTML).

    Returns the record that ``--json`` prints (``to_json()``), in seconds and bytes. A step that does not fit the memory
    is predicted too: ``fits`` is false and ``memory_shortage`` describes the shortage. Output of a script goes to
    standard output; calls from several threads are serialised.

    Raises ``InputError`` for options that contradict each other, ``MachineError`` for an unknown GPU, ``ModelError``
    for a script that fails, ``OutputError`` for files that cannot be written.

    >>> step = predict("resnet-50", gpu="h100-sxm", batch_size=64)
    >>> step.fits and 0 < step.interval_seconds[0] < step.iteration_seconds < step.interval_seconds[1]
    True
    """
    from e2e.capture.script import captures_kept
    from e2e.sources.gpu_prices import asked_price, with_cost
    from e2e.sources.predict_request import predict_request
    from e2e.sources.prepared_step import with_remarks
    from e2e.sources.requests import SpreadModel

    request = _request(asked, options)
    # Invalid prices and unwritable files are reported before long work.
    priced = None if price is None else asked_price(str(price), request)
    check_outputs({"--timeline": timeline, "--report": report}, _files_of(request))
    check_page(report)
    with _TURN, captures_kept() if advice else nullcontext():
        notes = []
        if isinstance(request, SpreadModel) and request.parallel is None:
            from e2e.sweeps.first_look import with_best_way

            request, chosen = with_best_way(request)
            notes = [chosen]
        answer = with_remarks(predict_request(request), notes=notes)
        if priced is not None:
            answer = with_cost(answer, priced)
        if advice:
            from e2e.sweeps.advice import advise

            answer = advise(request, answer, advice if callable(advice) else lambda line: None)
    if timeline is not None:
        from e2e.report.timeline_export import write_trace

        write_trace(answer.graph, answer.timeline, Path(timeline), answer.path, answer.iteration)
    if report is not None:
        from e2e.report.html_report import write_report

        write_report(answer, Path(report))
    return answer.prediction


def _request(asked: Sequence[str | Options], options: Mapping[str, Any]) -> Request:
    """Combine names, records and single options to one request."""
    from e2e.sources.requests import Request, all_options, request_of

    if len(asked) == 1 and isinstance(asked[0], Request) and not options:
        return asked[0]
    parts = [{"model": each} if isinstance(each, str) else each.given_values() for each in asked]
    found: dict[str, Any] = {}
    for name, value in (pair for part in (*parts, options) for pair in part.items()):
        if name in found:
            raise InputError(f"{all_options()[name].flag} is given twice; leave one out")
        found[name] = value
    unknown = [name for name in found if name not in all_options()]
    if unknown:
        raise TypeError(f"predict() got an unexpected keyword argument {unknown[0]!r}")
    return request_of(found)


def _files_of(request: Request) -> dict[str, Path]:
    """Return the files that the request reads, by option."""
    options = options_of(type(request)).values()
    return {each.flag: value for each in options if isinstance(value := getattr(request, each.name), Path)}


def serve(
    model: str | None = None, *, timeline: PathLike | None = None, report: PathLike | None = None, **options: Any
) -> ServingResult:
    """Predict what a served language model gives its users; ``python -m e2e serve``.

    ``model``: a name, of which the hub's are some; ``options``: those of the command line, the fields of
    :class:`e2e.ServingRequest` (``input_length`` for ``--input-length``). ``timeline`` and ``report``: files to write
    (Chrome trace of some steps, HTML with curves over concurrency).

    Returns the record that ``--json`` prints (``to_json()``), in seconds and bytes. Raises ``InputError`` for options
    that contradict each other and for unknown names, ``MachineError`` for an unknown GPU, ``ShortageError`` for a model
    that does not fit, ``OutputError`` for files that cannot be written.

    >>> found = serve("llama-3.1-8b", gpu="h100-sxm", concurrency=8, input_length=512, output_length=64)
    >>> found.ttft_interval_seconds[0] < found.ttft_seconds.mean < found.ttft_interval_seconds[1]
    True
    """
    from e2e.serving.serving_answer import serve as answer
    from e2e.serving.serving_request import ServingRequest
    from e2e.serving.serving_result import serving_result
    from e2e.step.option_fields import options_of

    unknown = [name for name in options if name not in options_of(ServingRequest)]
    if unknown:
        raise TypeError(f"serve() got an unexpected keyword argument {unknown[0]!r}")
    request = ServingRequest(model=model, **options)
    check_outputs({"--timeline": timeline, "--report": report}, {"--requests": request.trace})
    check_page(report)
    found = answer(request)
    result = serving_result(found)
    if timeline is not None:
        from e2e.serving.serving_report import write_serving_timeline

        write_serving_timeline(found, Path(timeline))
    if report is not None:
        from e2e.serving.serving_report import write_serving_page

        write_serving_page(found, result, Path(report))
    return result


def plan_serve(
    model: str | None = None, *, report: PathLike | None = None, progress: PlanProgress | None = None, **options: Any
) -> ServingPlan:
    """Find the cheapest way to serve a language model within latency targets; ``python -m e2e plan serve``.

    ``options``: those of the command line, the fields of :class:`e2e.PlanRequest` (``gpus_of`` for ``--gpus-of``).
    ``report``: file of the page to write. ``progress``: called with (deployments done, all, text of the newest).

    Returns all settings, the cheapest first, with ``best`` and ``frontier``; Ctrl-C keeps those that are done
    (``stopped``). Raises ``InputError`` for options that contradict each other and for unknown names, ``MachineError``
    for an unknown GPU, ``ShortageError`` if the model fits none of the GPUs.

    >>> plan = plan_serve("llama-3.2-1b", gpus_of="l4", gpus="1", concurrency=8, tpot="40ms", workers=1)
    >>> plan.best.copies
    1
    """
    from e2e.serving.serving_plan import plan_serving
    from e2e.serving.serving_request import PlanRequest

    request = PlanRequest(model=model, **options)
    check_outputs({"--report": report}, {"--model-config": request.model_config})
    check_page(report)
    plan = plan_serving(request, progress or (lambda done, count, text: None))
    if report is not None:
        from e2e.serving.serving_plan import write_plan_page

        write_plan_page(plan, Path(report))
    return plan


def sweep(
    model: PathLike,
    *,
    gpu: str | Sequence[str],
    gpus: int | Sequence[int],
    parallel: str | ParallelSpec | Sequence[str | ParallelSpec] = "auto",
    batch_size: int | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    recipe: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    attention: AttentionForm | None = None,
    stack: str | None = None,
    precision: Precision | Sequence[Precision] | None = None,
    compile: bool = False,
    network: str | None = None,
    tries: int = 12,
    tokens: str | float | None = None,
    deadline: str | float | None = None,
    price: str | float | PathLike | None = None,
    output: PathLike | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: SweepProgress | None = None,
) -> SweepResult:
    """Predict ``model`` on every GPU of ``gpu`` x number of ``gpus`` x way to spread it; ``python -m e2e sweep``.

    ``model``: a built-in transformer or a Hugging Face configuration file. ``parallel``: ``"auto"``, or texts of
    ``--parallel``. ``batch_size``: sequences of one micro-batch on one replica; ``global_batch``: sequences of all
    replicas in a step, which determines the number of micro-batches (of 1, 2 and 4 sequences if no size is given).
    ``recipe`` and ``precision``: one or several. ``tries``: number of ways of ``auto``, those that look fastest, that
    are predicted for each GPU and number of GPUs. ``tokens`` (``"1T"``): size of a whole training run, whose days and
    costs are reported; with ``price`` (dollars per GPU and hour, or a file) rows are ranked by cost, with ``deadline``
    (``"30d"``) those in time come first. ``output``: folder that keeps results and captures, to which a second call
    adds (``None``: nothing is kept). ``workers``: number of processes (default: the cores of this process), or ``ray``:
    address of a Ray cluster. ``progress``: called with (done, all, seconds since the start, newest row).

    Returns the ranked rows: those that run first, by samples per second; a way that does not fit or is not possible is
    a row with the reason. Raises ``InputError`` for options that are invalid for any number of GPUs, ``MachineError``
    for an unknown GPU, ``OutputError`` for a folder that cannot be written.

    >>> ranking = sweep("gpt2", gpu="h100-sxm", gpus=2, parallel=["dp=2", "tp=2"], sequence_length=64, workers=1)
    >>> [row.status for row in ranking], ranking[0].samples_per_second >= ranking[1].samples_per_second
    (['ok', 'ok'], True)
    """
    from e2e.capture.models.stacks import stack_of
    from e2e.sources.recipes import training_recipe
    from e2e.sweeps.first_look import promising_cells
    from e2e.sweeps.sweep_driver import run_plan
    from e2e.sweeps.sweep_driver import run_sweep as run_sweep
    from e2e.sweeps.sweep_space import SweepRequest, cells_of

    for option, number in (("batch-size", batch_size), ("global-batch", global_batch), ("workers", workers),
                           ("tries", tries), ("sequence-length", sequence_length)):  # fmt: skip
        check_count(option, number)
    recipes = [recipe] if recipe is None or isinstance(recipe, str) else list(recipe)
    precisions = [precision] if precision is None or isinstance(precision, str) else list(precision)
    for each in recipes:
        training_recipe(each)
    for name in precisions:
        _one_of("precision", name, (None, *get_args(Precision)))
    stack_of(stack)
    plan = run_plan(tokens, deadline, price)
    asked = [parallel] if isinstance(parallel, str | ParallelSpec) else parallel
    ways = [each if isinstance(each, str) else text_of(each) for each in asked]
    counts = [gpus] if isinstance(gpus, int) else gpus
    for count in counts:
        check_count("gpus", count)
    for text in ways:  # options that are invalid for any number of GPUs are errors, not rows
        if text != "auto":
            parse_parallel(text)
    experts, layers = _sizes(model)
    request = SweepRequest(
        os.fspath(model), batch_size, global_batch, sequence_length,
        _one_of("dtype", dtype, (None, *get_args(Dtype))),
        _one_of("attention", attention, (None, *get_args(AttentionForm))), network, experts, None,
        stack, None, compile, layers,
    )  # fmt: skip
    machines = [gpu] if isinstance(gpu, str) else gpu
    plan.check(machines)
    cells = cells_of(request, machines, counts, ways, recipes, precisions)
    if not cells:
        raise InputError(f"--global-batch {global_batch}: divides for no way to spread the model; try another")
    told = progress or (lambda done, total, seconds, row: None)
    with _TURN, tempfile.TemporaryDirectory(prefix="e2e-sweep-") as nowhere:
        looked = promising_cells(request, cells, tries)
        folder = Path(nowhere if output is None else output)
        return run_sweep(request, looked, folder, _workers(workers, ray), told, plan)


def _sizes(model: PathLike) -> tuple[int, int]:
    """Return the experts of a layer and the number of layers; an unknown model is one error, not one per row."""
    from e2e.parallelism.parallel_graph import configuration, layer_count
    from e2e.sweeps.sweep_space import experts_of

    config, name = configuration(os.fspath(model))
    return experts_of(config), layer_count(config, name)


def _workers(count: int | None, ray: str | None) -> Workers:
    from e2e.sweeps.workers import LocalWorkers, RayWorkers

    if ray is None:
        return LocalWorkers(count or len(os.sched_getaffinity(0)))
    if count is not None:
        raise InputError("--workers counts processes of this machine; leave it out with --ray")
    return RayWorkers(ray)


def _one_of(option: str, value: T, allowed: Sequence[Any]) -> T:
    if value not in allowed:
        offered = f"choose one of {', '.join(each for each in allowed if each is not None)}"
        instead = instead_of(str(value)) if option in ("dtype", "precision") else None
        raise InputError(f"--{option} {value}: {instead or offered}")
    return value


def _path(value: PathLike | None) -> Path | None:
    return None if value is None else Path(value)
