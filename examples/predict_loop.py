"""What ``python -m e2e predict --script`` does on one GPU (``e2e/sources/predict_request.py``), without its checks.

python examples/predict_loop.py
"""

import torch

from costmodel.gpu import gpu_cost_model
from costmodel.machines.machine_file import load_machine
from e2e.capture.session import CapturedWorkload, capture
from e2e.explain.critical_path import SimulatedStep
from e2e.explain.intervals import step_deviations
from e2e.lowering.lower_trace import lower_step
from e2e.price.host_overheads import load_overheads
from e2e.price.pricing import price
from e2e.simulate.simulator import simulate_iterations
from e2e.step.options import StepOptions

machine = load_machine("a100-sxm-80gb")
with torch.device("meta"):  # sizes without data
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))
    data = torch.randn(512, 1024)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


trace = capture(CapturedWorkload("small", model, step))  # what the host calls, in order
lowered = lower_step(trace, StepOptions())  # what each call launches; memory replayed
overheads = load_overheads(architecture=machine.chip().architecture)
graph = price(lowered.graph, gpu_cost_model(machine), overheads)  # a duration for every kernel and host action
steady = simulate_iterations(graph, 6)  # threads, streams and ranks; the host runs ahead
looked_at = steady.timeline.iterations - 2
found = SimulatedStep(graph, steady.timeline, looked_at, steady.period_seconds, host_factor=overheads.factor)
low, high = step_deviations(found).around(found.seconds)
print(f"{found.seconds * 1e3:.3f} ms, 80 % in {low * 1e3:.3f} to {high * 1e3:.3f} ms")
print({kind: f"{seconds * 1e6:.0f} us" for kind, seconds in found.path.by_kind.items()})  # why the step takes so long
print(f"{lowered.memory[0].peak_bytes / 2**20:.1f} MiB at the peak")
