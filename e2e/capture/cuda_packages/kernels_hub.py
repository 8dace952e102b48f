"""``kernels``, by which programs load compiled kernels from a hub: those of FlashAttention are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from e2e.capture.cuda_packages.finder import refuse
from e2e.capture.cuda_packages.flash_attention import MODULES as FLASH


def get_kernel(repo_id: str, *_: Any, **__: Any) -> Any:
    """Return the functions of the kernel in a repository of the hub."""
    name = repo_id.rpartition("/")[2].lower().replace("_", "-")
    if "flash" not in name or "attn" not in name.replace("attention", "attn"):
        return refuse(f"the kernel {repo_id}")
    exported = FLASH["flash_attn_interface" if name.rstrip("-").endswith("3") else "flash_attn"]
    functions = SimpleNamespace(**exported)
    functions.flash_attn_interface = functions
    return functions


def _hardware(*_: Any, **__: Any) -> bool:
    return True


MODULES: dict[str, dict[str, Any]] = {
    "kernels": {"get_kernel": get_kernel, "has_kernel": _hardware, "load_kernel": get_kernel},
}
