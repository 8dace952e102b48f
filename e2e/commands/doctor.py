"""``python -m e2e doctor``: checks whether steps can be captured and predicted here, with remedies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from costmodel.commands import doctor
from costmodel.commands.doctor import BadPair, Finding
from costmodel.machines.cluster_file import cluster_files
from costmodel.machines.machine_file import machine_files

_TORCH = "pip install 'fusion-costmodel[e2e]'"
PAIRS = (
    BadPair(
        # NumPy 2 changed its ABI; PyTorch is built for it since 2.3 (its release notes).
        {"numpy": ">=2", "torch": "<2.3"},
        "this PyTorch was built for NumPy 1: tensors and arrays cannot be exchanged",
        _TORCH,
    ),
)
# Optional libraries that a step may use if they are installed.
_LIBRARIES = {"timm": "--model timm/NAME", "mamba_ssm": "--linear-attention", "torchrec": "scripts that use it"}
_ROOT = Path(__file__).parents[2]


def doctor_command(as_json: bool) -> None:
    """Print the findings; exits with status 1 if something is broken."""
    checks = [_packages, _imports, doctor.cores, doctor.memory, doctor.folders, _shipped]
    doctor.report("e2e", checks, as_json)


def _packages() -> Iterator[Finding]:
    yield from doctor.packages("e2e", {"cluster": "e2e sweep --ray"}, PAIRS)
    yield from doctor.modules_once(("torch", "transformers", "xgboost", "triton"))
    for name, purpose in _LIBRARIES.items():
        version = doctor.installed(name)
        if version is not None:
            yield Finding(name, "ok", f"{version}, for {purpose}")


def _imports() -> list[Finding]:
    return doctor.imports({"torch": "torch", "transformers": "transformers"}, f"{_TORCH} --force-reinstall")


def _shipped() -> Iterator[Finding]:
    calibration = _ROOT / "costmodel" / "calibration"
    yield doctor.shipped("machine files", machine_files().values())
    yield doctor.shipped("cluster files", cluster_files().values())
    yield doctor.shipped("fitted kernels", (calibration / "gpu").glob("*.json"))
    yield doctor.shipped("fitted collectives", calibration.glob("*/collectives.json"))
    yield doctor.shipped("host overheads", (calibration / "host_overheads").glob("*.json"))
