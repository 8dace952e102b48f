"""Step time of training and inference by critical path, and served language models. Imports ``costmodel`` alone.

::

    import e2e

    step = e2e.predict("gpt2-large", gpu="h100-sxm", batch_size=4, sequence_length=1024)
    node = e2e.ClusterOptions(gpu="dgx-h100", gpus=8)
    step = e2e.predict("llama-8b", node, e2e.StackOptions(recipe="torchtitan"), parallel="fsdp=8")
    served = e2e.serve("llama-3.1-8b", gpu="h100-sxm", concurrency=64)
    plan = e2e.plan_serve("llama-3.1-8b", gpus_of="h100-sxm,l40s", rate=20, ttft="500ms", tpot="40ms")
    ranking = e2e.sweep("llama-8b", gpu=("h100-sxm", "h200-sxm"), gpus=(8, 64), global_batch=512, output="sweep/")

Nothing is loaded before it is used. docs/api.md has more.
"""

from typing import TYPE_CHECKING

from costmodel.base.lazy_names import lazy_names

__all__ = [
    "ClusterOptions",
    "Model",
    "ParallelSpec",
    "PlanRequest",
    "Prediction",
    "Recording",
    "Script",
    "ScriptJob",
    "ServingPlan",
    "ServingRequest",
    "ServingResult",
    "ShardedTables",
    "SpreadModel",
    "StackOptions",
    "SweepResult",
    "SweepRow",
    "Trace",
    "plan_serve",
    "predict",
    "serve",
    "sweep",
]

if TYPE_CHECKING:
    from e2e.commands.e2e_api import plan_serve, predict, serve, sweep
    from e2e.explain.prediction import Prediction
    from e2e.parallelism.spec import ParallelSpec
    from e2e.serving.serving_plan import ServingPlan
    from e2e.serving.serving_request import PlanRequest, ServingRequest
    from e2e.serving.serving_result import ServingResult
    from e2e.sources.requests import Model, Recording, Script, ScriptJob, ShardedTables, SpreadModel, Trace
    from e2e.step.options import ClusterOptions, StackOptions
    from e2e.sweeps.sweep_driver import SweepResult
    from e2e.sweeps.sweep_results import SweepRow
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ClusterOptions": "e2e.step.options",
            "Model": "e2e.sources.requests",
            "ParallelSpec": "e2e.parallelism.spec",
            "Prediction": "e2e.explain.prediction",
            "PlanRequest": "e2e.serving.serving_request",
            "Recording": "e2e.sources.requests",
            "Script": "e2e.sources.requests",
            "ScriptJob": "e2e.sources.requests",
            "ServingPlan": "e2e.serving.serving_plan",
            "ServingRequest": "e2e.serving.serving_request",
            "ServingResult": "e2e.serving.serving_result",
            "ShardedTables": "e2e.sources.requests",
            "SpreadModel": "e2e.sources.requests",
            "StackOptions": "e2e.step.options",
            "SweepResult": "e2e.sweeps.sweep_driver",
            "SweepRow": "e2e.sweeps.sweep_results",
            "Trace": "e2e.sources.requests",
            "plan_serve": "e2e.commands.e2e_api",
            "predict": "e2e.commands.e2e_api",
            "serve": "e2e.commands.e2e_api",
            "sweep": "e2e.commands.e2e_api",
        },
    )
