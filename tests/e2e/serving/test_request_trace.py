"""Recorded requests: the three formats, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from e2e.serving.workload import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:01.500000+00:00,110,27
2024-05-10 00:00:00.250000+00:00,2162,5
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 48], "priority": 1}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "arrivals", "inputs", "outputs"),
    [
        (AZURE, [0, 0.052], [4808, 3180], [10, 8]),
        (AZURE_2024, [0, 1.25], [2162, 110], [5, 27]),
        ("\ufeff" + BURST, [0, 113], [472, 417], [18, 276]),
        (MOONCAKE, [0, 3.053], [6955, 6472], [52, 26]),
    ],
)
def test_formats(tmp_path, text, arrivals, inputs, outputs):
    load = read_trace(written(tmp_path, text))
    assert load.arrivals == pytest.approx(np.array(arrivals), abs=1e-6)
    assert load.inputs.tolist() == inputs and load.outputs.tolist() == outputs


def test_prefixes_and_priorities(tmp_path):
    load = read_trace(written(tmp_path, MOONCAKE))
    assert load.prefixes == [(46, 47), (46, 48)] and load.prefix_block == 512
    assert load.priorities is not None and load.priorities.tolist() == [0, 1]
    assert read_trace(written(tmp_path, AZURE)).prefixes is None


def test_a_part_of_a_trace_and_its_lengths_alone(tmp_path):
    path = written(tmp_path, BURST)
    assert read_trace(path).unanswered == 1
    assert read_trace(path, duration=60.0).count == 1
    closed = read_trace(path, concurrency=8)
    assert closed.arrivals is None and closed.concurrency == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: has the columns none"),
        ("a,b\n1,2\n", "line 1: has the columns a, b"),
        (AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP: Invalid isoformat string: 'yesterday'"),
        (AZURE + "2023-11-16 18:17:05,1\n", "line 4: GeneratedTokens: Input should be a valid integer"),
        (BURST + "nan,m,1,2,3,x\n", "line 5: Timestamp: Input should be a finite number"),
        (BURST + "7,m,1.5,2,3,x\n", "line 5: Request tokens: Input should be a valid integer"),
        (BURST + "7,m,-1,2,3,x\n", "line 5: Request tokens: Input should be greater than or equal to 0"),
        (BURST + "7,m,1e300,2,3,x\n", "line 5: Request tokens: Input should be a valid integer"),
        (MOONCAKE + "{", "line 3: Invalid JSON"),
        (MOONCAKE + "[1]", "line 3: Input should be an object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 2}', "line 3: output_length: missing"),
        (MOONCAKE + '{"timestamp": 1, "input_length": null, "output_length": 1}', "input_length: Input should be"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}', "hash_ids: must be"),
        ("Timestamp,Request tokens,Response tokens\n1,2,0\n", "has no request that was answered"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_file_and_line(tmp_path, text, told):
    path = written(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path)) and told in str(error.value)
    assert "\n" not in str(error.value)
