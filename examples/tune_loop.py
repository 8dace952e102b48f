"""What ``python -m fusion tune`` does (``fusion/tuning/tuning_run.py``): each step once, without time budget and races.

``model.onnx`` here has one input ``x`` of 1 x 16 x 12 x 12 and one output, as ``tests/test_public_api.py`` writes it.

python examples/tune_loop.py
"""

from pathlib import Path

import numpy as np
import onnx

from costmodel.cpu.learned_residual import ResidualModel
from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_file import load_machine
from fusion.acceptance.output_check import DoubleModel
from fusion.analysis.analyzer import is_hopeless, network_bytes, predict_seconds
from fusion.model.conv_graph import find_sites, select
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from fusion.relax.onnx.importer import import_onnx
from schedules.contract.cpu_target import host_target
from schedules.measuring.measure_runner import Runner
from schedules.tuning.kernel_tuner import Tuner, TuningTask
from schedules.tuning.tuning_records import RecordStore

cpu, machine = host_target(threads=1), load_machine("xeon-amx-2c")
mod = import_onnx("model.onnx").mod  # ONNX -> canonical Relax
graph = extract_graph(mod)  # the layers that templates make
sites = find_sites(graph, cpu)  # chains of up to three that one kernel could compute

roofline = RooflineModel(machine, cpu.threads, network_bytes(graph))  # ask: what is not worth a trial
predicted = predict_seconds(sites, roofline)
sites = [site for site in sites if not is_hopeless(site, predicted, roofline.explain)]

operators = {node.operator for node in graph.nodes} | {site.operator for site in sites}
with RecordStore(Path("records"), cpu) as store, Runner(cpu) as runner:  # search: verified and timed in a worker
    tuner = Tuner(store, cpu, ResidualModel(roofline), runner)
    best = tuner.tune([TuningTask(each, trials=3) for each in operators]).best

seconds = {operator: record.seconds for operator, record in best.items()}
plan = select(graph, sites, seconds)  # the fastest cover of every chain, exactly
configs = {operator: best[operator].config for operator in plan.operators}
network = build_executable(lower(mod, plan, configs, cpu), cpu)  # act: calls of the chosen kernels, then machine code

x = np.random.default_rng(0).normal(size=(1, 16, 12, 12)).astype(np.float32)
(output,) = network(x)
(exact,) = DoubleModel(onnx.load("model.onnx")).run({"x": x}).values()  # the same model in FP64
print([group.operator.__class__.__name__ for group in plan.groups], "largest error", abs(output - exact).max())
