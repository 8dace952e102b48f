"""The Python API of ``e2e``: :func:`predict` and :func:`sweep`. The command line calls these two functions.

Errors that a user can cause are :class:`costmodel.ProjectError`, one line each, which names options as the command line
does (``--batch-size`` is ``batch_size`` here).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from costmodel.base.counts import check_count
from costmodel.base.errors import InputError
from costmodel.base.spared_objects import old_objects_spared
from costmodel.base.whole_file import check_outputs
from costmodel.operators.expert_routing import ExpertRouting
from e2e.parallelism.spec import ParallelSpec, parse_parallel, text_of
from e2e.sources.asked.request import ConfigurationOptions, MachineOptions, PredictRequest, WorkloadOptions
from e2e.step.choices import (
    AttentionForm,
    Dtype,
    LinearAttentionForm,
    MemoryLayout,
    MixtureForm,
    Mode,
    OptimizerForm,
    instead_of,
)
from e2e.step.precision import Precision
from e2e.step.routing_text import parse_routing
from e2e.whatif.questions import parse_what_if

if TYPE_CHECKING:
    from e2e.explain.prediction import Prediction
    from e2e.simulate.skew import Skew
    from e2e.sweeps.sweep_driver import SweepProgress, SweepResult
    from e2e.sweeps.workers import Workers

PathLike = str | os.PathLike[str]
T = TypeVar("T")
# A capture changes what PyTorch does in the whole process: threads that ask take turns.
_TURN = RLock()


def predict(
    model: str | None = None,
    *,
    model_config: PathLike | None = None,
    script: str | Callable[..., Any] | None = None,
    traces: PathLike | Sequence[PathLike] = (),
    kineto: PathLike | Sequence[PathLike] = (),
    gpu: PathLike | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    network: str | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    document_length: int | None = None,
    cache_length: int | None = None,
    mode: Mode = "train",
    recipe: str | None = None,
    dtype: Dtype | None = None,
    attention: AttentionForm | None = None,
    stack: str | None = None,
    lora: int | None = None,
    layout: MemoryLayout = "contiguous",
    moe: MixtureForm = "grouped",
    routing: str | ExpertRouting = "balanced",
    precision: Precision | None = None,
    linear_attention: LinearAttentionForm | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    optimizer: OptimizerForm | None = None,
    parallel: str | ParallelSpec | None = None,
    sharding: PathLike | None = None,
    tables: PathLike | None = None,
    ranks: Sequence[int] = (),
    skew: str | Skew | None = None,
    overheads: PathLike | None = None,
    retarget: str | None = None,
    price: str | float | PathLike | None = None,
    advice: bool | Callable[[str], object] = False,
    what_if: str | Sequence[str] = (),
    timeline: PathLike | None = None,
    report: PathLike | None = None,
) -> Prediction:
    """One steady step of a model on one GPU or many, or a recorded run replayed; ``python -m e2e predict``.

    What is computed is one of ``model`` (a built-in one), ``model_config`` (a Hugging Face configuration), ``script``
    (``"train.py:make_step"``, or the function ``make_step`` itself: called without a GPU, it returns the module and a
    function that runs one step, :func:`e2e.capture.script.load_script`), ``traces`` (PyTorch execution traces) and
    ``kineto`` (profiles of the same run). ``batch_size`` counts samples per GPU and micro-batch, ``sequence_length``
    tokens, ``document_length`` those of each document of which a sequence is packed, ``cache_length`` those of each
    sequence whose keys and values are there (a step that decodes). ``gpu`` is a name of ``python -m
    costmodel machines`` or a file, ``gpus`` and ``nodes`` are of the whole job. ``parallel``: ``"dp=2,tp=4"`` or a
    :class:`ParallelSpec`. ``recipe``: how a transformer is trained (docs/parallel.md): it says what is not asked for of
    ``dtype``, ``attention``, ``stack`` and ``parallel``; by default BF16 with FP32 master weights and states, and fused
    attention. ``stack``: whose kernels it has, such as ``"megatron"``;
    ``lora``: the rank of adapters beside frozen weights; ``layout``: of the images of a built-in model. ``moe``,
    ``routing`` and ``precision``: how experts are computed, how they share tokens, and a recipe of 8 bits;
    ``linear_attention``: whether Mamba and gated delta rules run by fused kernels (default: where their libraries are
    installed). ``optimizer``: its form where the model leaves it open. ``tables``, ``sharding``: ``--config`` and
    ``--sharding`` of DLRM. ``price``: dollars per GPU and hour, or a YAML file of prices
    (:mod:`e2e.sources.gpu_prices`). ``advice``: other settings and the largest batch are predicted too, and progress
    is told to it where it is a function (Ctrl-C ends that and keeps what is known). ``what_if``: questions such as
    ``"kernels:gemm=2x"`` or ``"batch=512+host=1.5x"``, answered in ``what_if`` of the result. ``timeline`` and
    ``report``: files to write (Chrome trace, HTML). docs/options.md says which of these goes with which source.

    Returns the record that ``--json`` prints (``to_json()``), in seconds and bytes. A step that does not fit the memory
    is predicted all the same: ``fits`` is false and ``memory_shortage`` says what is missing. What a script prints goes
    to standard output; calls from several threads take turns.

    Raises ``InputError`` for options that contradict each other, ``MachineError`` for an unknown GPU, ``ModelError``
    for a script that fails, ``OutputError`` for files that cannot be written.

    >>> step = predict("resnet-50", gpu="h100-sxm", batch_size=64)
    >>> step.fits and 0 < step.interval_seconds[0] < step.iteration_seconds < step.interval_seconds[1]
    True
    """
    from e2e.capture.kept_captures import captures_kept
    from e2e.report.outputs import write_files
    from e2e.simulate.skew import parse_skew
    from e2e.sources.gpu_prices import asked_price, with_cost
    from e2e.sources.predict_request import predict_request
    from e2e.sources.prepared_step import told
    from e2e.sweeps.best_way import is_open, with_best_way

    for option, number in (("gpus", gpus), ("nodes", nodes), ("batch-size", batch_size),
                           ("sequence-length", sequence_length), ("document-length", document_length),
                           ("cache-length", cache_length), ("lora", lora)):  # fmt: skip
        check_count(option, number)
    workload = WorkloadOptions(
        model, _path(model_config), script, _texts(traces), _texts(kineto), _path(tables),
        batch_size, sequence_length, _one_of("mode", mode, get_args(Mode)), document_length,
        cache_length,
    )  # fmt: skip
    configuration = ConfigurationOptions(
        _one_of("dtype", dtype, (None, *get_args(Dtype))),
        _one_of("attention", attention, (None, *get_args(AttentionForm))),
        cuda_graph,
        compile,
        _path(overheads),
        parse_parallel(parallel, gpus) if isinstance(parallel, str) else parallel,
        _path(sharding),
        tuple(ranks),
        stack,
        lora,
        _one_of("layout", layout, get_args(MemoryLayout)),
        _one_of("moe", moe, get_args(MixtureForm)),
        parse_routing(routing) if isinstance(routing, str) else routing,
        _one_of("precision", precision, (None, *get_args(Precision))),
        _one_of("linear-attention", linear_attention, (None, *get_args(LinearAttentionForm))),
        _one_of("optimizer", optimizer, (None, *get_args(OptimizerForm))),
        recipe,
    )
    varied = parse_skew(skew) if isinstance(skew, str) else skew
    machine = MachineOptions(None if gpu is None else os.fspath(gpu), gpus, nodes, network, retarget, varied)
    questions = tuple(parse_what_if(each) for each in ([what_if] if isinstance(what_if, str) else what_if))
    request = PredictRequest(workload, configuration, machine, questions)
    # What is wrong with a price, and files that cannot be written, are told before long work.
    priced = None if price is None else asked_price(str(price), machine)
    read = {"--model-config": model_config, "--config": tables, "--sharding": sharding, "--overheads": overheads}
    check_outputs({"--timeline": timeline, "--report": report}, read)
    with _TURN, old_objects_spared(), captures_kept() if advice else nullcontext():
        chosen = ""
        if is_open(request):
            request, chosen = with_best_way(request)
        answer = predict_request(request)
        if chosen:
            answer = told(answer, notes=[chosen])
        if priced is not None:
            answer = with_cost(answer, priced)
        if advice:
            from e2e.advice.advisor import advise

            answer = advise(request, answer, advice if callable(advice) else lambda line: None)
    write_files(answer, _path(timeline), _path(report))
    return answer.prediction


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
    """Predicts ``model`` on every GPU of ``gpu`` x number of ``gpus`` x way to spread it; ``python -m e2e sweep``.

    ``model``: a built-in transformer or a Hugging Face configuration file. ``parallel``: ``"auto"``, or texts of
    ``--parallel``. ``batch_size``: sequences of one micro-batch on one replica; ``global_batch``: of all replicas in a
    step, from which the micro-batches follow (of 1, 2 and 4 sequences where no size is given). ``recipe`` and
    ``precision``: one or several. ``tries``: ways of ``auto`` that are predicted on each number of each GPU, those
    that look fastest. ``tokens`` (``"1T"``): of a whole training run, whose days and costs are told; with ``price``
    (dollars per GPU and hour, or a file) rows are ranked by cost, with ``deadline`` (``"30d"``) those in time first.
    ``output``: a folder that keeps results and captures, to which a second call adds (``None``: nothing is kept).
    ``workers``: processes (default: the cores of this one), or ``ray``: the address of a Ray cluster. ``progress`` is
    called with (done, all, seconds since the start, newest row).

    Returns the rows, ranked: those that run first, by samples per second; a way that does not fit or is not possible is
    a row that says why. Raises ``InputError`` for what no number of GPUs makes right, ``MachineError`` for an unknown
    GPU, ``OutputError`` for a folder that cannot be written.

    >>> ranking = sweep("gpt2", gpu="h100-sxm", gpus=2, parallel=["dp=2", "tp=2"], sequence_length=64, workers=1)
    >>> [row.status for row in ranking], ranking[0].samples_per_second >= ranking[1].samples_per_second
    (['ok', 'ok'], True)
    """
    from e2e.capture.models.stacks import stack_of
    from e2e.sources.recipes import recipe_of
    from e2e.sweeps.first_look import promising
    from e2e.sweeps.run_plan import run_plan
    from e2e.sweeps.sweep_driver import sweep as run_sweep
    from e2e.sweeps.sweep_space import SweepRequest, cells_of

    for option, number in (("batch-size", batch_size), ("global-batch", global_batch), ("workers", workers),
                           ("tries", tries), ("sequence-length", sequence_length)):  # fmt: skip
        check_count(option, number)
    recipes = [recipe] if recipe is None or isinstance(recipe, str) else list(recipe)
    precisions = [precision] if precision is None or isinstance(precision, str) else list(precision)
    for each in recipes:
        recipe_of(each)
    for name in precisions:
        _one_of("precision", name, (None, *get_args(Precision)))
    stack_of(stack)
    plan = run_plan(tokens, deadline, price)
    asked = [parallel] if isinstance(parallel, str | ParallelSpec) else parallel
    ways = [each if isinstance(each, str) else text_of(each) for each in asked]
    counts = [gpus] if isinstance(gpus, int) else gpus
    for count in counts:
        check_count("gpus", count)
    for text in ways:  # what no number of GPUs makes right is an error, not a row
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
        looked = promising(request, cells, tries)
        folder = Path(nowhere if output is None else output)
        return run_sweep(request, looked, folder, _workers(workers, ray), told, plan)


def _sizes(model: PathLike) -> tuple[int, int]:
    """Experts of a layer, and layers; one error for an unknown model, not one per row."""
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


def _texts(values: PathLike | Sequence[PathLike]) -> tuple[str, ...]:
    """One file (or pattern) or several."""
    return (os.fspath(values),) if isinstance(values, str | os.PathLike) else tuple(os.fspath(each) for each in values)
