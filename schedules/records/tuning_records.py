"""Tuning records, and their lines in a MetaSchedule database.

A line of ``database_tuning_record.json`` is ``[workload index, [[trace, decisions], [seconds], target, arguments]]``.
Our templates emit loops directly and do not schedule the naive ones, so the configuration *is* the decision: the trace
annotates the root block of the workload with it, as JSON text, and replaying the trace yields a function from whose
annotation it can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.operators.layers import Operator
from costmodel.operators.serialization import from_record, to_record
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import template_revision

ANNOTATION = "fusion.config"


@dataclass(frozen=True)
class Record:
    """``config`` of ``operator`` ran in ``seconds``. ``confirmed``: by a comparison with its best competitors."""

    operator: Operator
    config: Mapping[str, int]
    seconds: float
    confirmed: bool = False


@dataclass(frozen=True)
class Failure:
    """``config`` of ``operator`` failed, with kind and message of
    :class:`schedules.measuring.measure_messages.MeasureOutcome`.
    """

    operator: Operator
    config: Mapping[str, int]
    error: str
    message: str


def environment(cpu: CpuTarget, dtype: str = "float32") -> dict[str, str]:
    """Conditions of a measured time of an operator of ``dtype`` besides operator and configuration.

    They are part of the key of all stored data.
    """
    return {"cpu": cpu.key, "tvm": version("apache-tvm"), "templates": template_revision(dtype)}


def annotation(record: Record, environment: Mapping[str, str]) -> str:
    """Text of the trace annotation: operator, configuration and the environment of the measurement."""
    content = {
        "operator": to_record(record.operator),
        "config": dict(record.config),
        "confirmed": record.confirmed,
        **environment,
    }
    text = json.dumps(content, sort_keys=True)
    # TVM quotes the text without escaping it, and does not unescape it when reading.
    assert "\\" not in text, text
    return text


def recorded_operator(record: Any) -> Operator:
    """Operator of a line; raises ``ValueError`` or ``TypeError`` if it is not a kernel's operator."""
    operator = from_record(record)
    if not isinstance(operator, Operator):
        raise ValueError("not an operator of a kernel")
    hash(operator)  # TypeError if its sizes are mappings
    return operator


def parse_line(line: str) -> tuple[Record, dict[str, str]] | None:
    """Record of a line and its environment, or None for a foreign line or another version of ours.

    Raises ``ValueError`` if it is not JSON.
    """
    content = decoded(line)
    try:
        _, ((instructions, _), run_seconds, *_) = content
        text = next((i[1][1] for i in instructions if i[0] == "Annotate" and i[2] == [ANNOTATION]), None)
        if text is None:
            return None
        fields = decoded(text[1:-1])
        operator = recorded_operator(fields.pop("operator"))
        config = {str(knob): int(value) for knob, value in fields.pop("config").items()}
        record = Record(operator, config, float(min(run_seconds)), bool(fields.pop("confirmed")))
    except MALFORMED:
        return None
    return record, fields


def workload_line(operator: Operator) -> str:
    """Line of ``database_workload.json``: the operator in framework layout and its structural hash."""
    from tvm.s_tir.meta_schedule.database import Workload

    return json.dumps(_plain(Workload(_workload(operator)).as_json()), separators=(",", ":"))


def record_line(record: Record, workload_index: int, environment: Mapping[str, str], target: Any) -> str:
    """Line of ``database_tuning_record.json``."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

    module = _workload(record.operator)
    schedule = Schedule(module)
    schedule.annotate(schedule.get_sblock("root"), ANNOTATION, annotation(record, environment))
    arguments = ArgInfo.from_prim_func(module["main"])
    entry = TuningRecord(schedule.trace, Workload(module), [record.seconds], target, arguments)
    return json.dumps([workload_index, _plain(entry.as_json())], separators=(",", ":"))


@lru_cache(maxsize=256)
def _workload(operator: Operator) -> Any:
    from schedules.contract.operator_workload import workload

    return workload(operator)


def read_config(function: Any) -> tuple[Operator, dict[str, int]] | None:
    """Operator and configuration annotated on ``function``'s root block, or None."""
    root = function.body
    annotations = getattr(getattr(root, "block", None), "annotations", {})
    if ANNOTATION not in annotations:
        return None
    fields = decoded(str(annotations[ANNOTATION]))
    return from_record(fields["operator"]), {knob: int(value) for knob, value in fields["config"].items()}


def _plain(value: Any) -> Any:
    """Convert TVM's containers and numbers to Python's."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else int(value)
