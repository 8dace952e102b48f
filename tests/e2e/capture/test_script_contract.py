"""The contract of ``make_step`` as its tutorial tells it: what is refused and with which advice, what reads give."""

# ruff: noqa: E402

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from costmodel.base.errors import InputError, ModelError
from e2e.capture import recorder
from e2e.capture.distributed.distributed_capture import capture_distributed
from e2e.capture.script import Fallback, capture_script, load_script

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "predict-my-script.md"
CONTRACT = PAGE.read_text(encoding="utf-8").partition("## The contract of `make_step`")[2]
REFUSED = re.findall(r"^\| ([^|]+) \|", CONTRACT.partition("| in the script |")[2].partition("\n\n")[0], re.MULTILINE)

LAYER = "layer = torch.nn.Linear(8, 8).cuda()\ndata = torch.randn(4, 8, device='cuda')\n"
FAKELESS = """
@torch.library.custom_op("contract::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
# By row of the page: the body of make_step, GPUs (None: one, without --gpus), what the refusal says.
ROWS = {
    "`torch.cuda.CUDAGraph`, `make_graphed_callables`": (
        LAYER + "return layer, lambda: torch.cuda.make_graphed_callables(layer, (data,))",
        None,
        "give --cuda-graph",
    ),
    "`.numpy()`, `.tolist()` of whole numbers on the GPU": (
        LAYER + "return layer, lambda: layer(data).argmax(1).tolist()",
        None,
        r"may be zeros: .cpu\(\).tolist\(\)",
    ),
    "a tensor of the CPU meets one of the GPU": (
        LAYER + "return layer, lambda: layer(torch.randn(4, 8, device='cpu'))",
        None,
        r"move it with .to\('cuda'\)",
    ),
    "a custom operator without `register_fake`": (
        LAYER + "return layer, lambda: twice(data)",
        None,
        "register_fake",
    ),
    "operators of sparse tensors": (
        LAYER + "return layer, lambda: torch.sparse.mm("
        "torch.sparse_coo_tensor(torch.zeros(2, 3).long().cuda(), data[0, :3], (8, 8)), data.T)",
        None,
        "write it with dense tensors",
    ),
    "`scaled_dot_product_attention` of nested tensors": (
        LAYER + "rows = torch.nested.nested_tensor([data.view(1, 4, 8)] * 2, layout=torch.jagged)\n"
        "return layer, lambda: torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)",
        None,
        "write flex_attention with a mask of documents, or a padded batch",
    ),
    "a loop until a value is reached": (
        LAYER + "def step():\n    while layer(data).sum().item() > 0.5:\n        pass\nreturn layer, step",
        None,
        "give it a fixed number of rounds",
    ),
    "`sys.exit`, `argparse` errors": ("raise SystemExit('done')", None, "it must return from the function"),
    "`init_process_group` without `--gpus`": (
        "import torch.distributed as dist\ndist.init_process_group('nccl')",
        None,
        "say with --gpus on how many GPUs",
    ),
}


def written(folder: Path, body: str, before: str = "", arguments: str = "") -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "train.py").write_text(f"import torch\n{before}\ndef make_step({arguments}):\n{lines}", encoding="utf-8")
    return f"{folder / 'train.py'}:make_step"


def test_every_row_of_the_page_is_tried():
    assert [row for row in REFUSED if not row.startswith("-")] == list(ROWS)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("row", ROWS)
def test_what_is_refused_says_what_to_write_instead(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorder, "MOST_CALLS", 200)
    body, gpus, advice = ROWS[row]
    reference = written(tmp_path, body, FAKELESS if "twice" in body else "")
    with pytest.raises((ModelError, InputError), match=advice) as caught:
        if gpus is None:
            capture_script(load_script(reference))
        else:
            capture_distributed(reference, gpus)
    assert "train.py" in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_are_those_asked_then_those_of_the_function_then_one(tmp_path: Path):
    def sizes(arguments: str, **asked: int) -> list[int]:
        reference = written(
            tmp_path,
            "layer = torch.nn.Linear(8, 8).cuda()\nlayer.sizes = [batch_size, sequence_length]\n"
            "return layer, lambda: layer(torch.randn(1, 8, device='cuda'))",
            arguments=arguments,
        )
        return load_script(reference, **{"batch_size": Fallback(1), **asked}).module.sizes

    assert sizes("batch_size, sequence_length=7") == [1, 7]
    assert sizes("batch_size=5, sequence_length=7") == [5, 7]
    assert sizes("batch_size=5, sequence_length=7", batch_size=3, sequence_length=9) == [3, 9]
    with pytest.raises(InputError, match="needs a value for sequence_length; give --sequence-length"):
        sizes("batch_size, sequence_length")
    with pytest.raises(InputError, match="needs a value for width; give the parameter a default"):
        sizes("width, batch_size, sequence_length=7")


READS = """
layer = torch.nn.Linear(8, 8).cuda()
seen = layer.seen = {"made": torch.randn(2).device.type}
known = torch.tensor([3, 4], device="cuda")

def step():
    result = layer(torch.randn(4, 8, device="cuda"))
    seen["in step"] = torch.randn(2).device.type
    seen["item"], seen["float"] = result.sum().item(), float(result.mean().detach())
    seen["flag"], seen["any"] = bool((result > 0)[0, 0]), bool((result > 0).any())
    seen["shown"] = f"{result.sum():.2f}"
    seen["cpu"], seen["array"] = result.detach().cpu().abs().sum().item(), result.detach().cpu().numpy().shape
    seen["known"] = (known * 2).tolist()
    seen["selected"] = result[result > 0].shape[0]
    result.sum().backward()

return layer, step
"""


def test_reads_give_what_the_page_says(tmp_path: Path):
    workload = load_script(written(tmp_path, READS.strip()))
    capture_script(workload)
    assert workload.module.seen == {
        "made": "cuda",
        "in step": "cpu",
        "item": 1.0,
        "float": 1.0,
        "flag": True,
        "any": False,
        "shown": "1.00",
        "cpu": 0.0,
        "array": (4, 8),
        "known": [6, 8],
        "selected": 32,
    }
