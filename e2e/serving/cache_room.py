"""Memory of a deployment: weights, what steps need, and the tokens that the cache holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from e2e.serving.deployment import Deployment

# What an engine's process takes beside weights and cache: CUDA context and code, communicators, graphs of all captured
# sizes, workspaces of kernels.
_CONTEXT, _PER_GPU_OF_GROUP = 1.2 * 2**30, 0.6 * 2**30
# Of that, what vLLM counts on one GPU, beside PyTorch's tensors; its logs say 0.05 to 0.34 GiB ("non_torch_memory").
_PROFILED = 0.15 * 2**30


@dataclass(frozen=True)
class CacheRoom:
    """Bytes on the fullest GPU, and tokens of the whole deployment's cache."""

    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    reserve_bytes: float
    cache_bytes: float
    tokens: int

    def memory(self) -> dict[str, float]:
        """Bytes by part."""
        return {name: value for name, value in asdict(self).items() if name.endswith("_bytes")}

    def shortage(self, deployment: Deployment, longest: int) -> str:
        """Why ``longest`` tokens do not fit, and how much is missing."""
        needed = self.weight_bytes + self.activation_bytes + self.reserve_bytes
        missing = needed + longest * deployment.cache_bytes() - self.usable_bytes
        gpu = deployment.cluster.machine.name
        return (
            f"{deployment.model.name}: does not fit {deployment.parallel.gpus} x {gpu} with the cache of a request of "
            f"{longest:,} tokens: {missing / 1e9:.3g} GB a GPU are missing (weights {self.weight_bytes / 1e9:.3g} GB, "
            f"usable {self.usable_bytes / 1e9:.3g} GB); give more --gpus, fewer bits with --precision, or a larger GPU"
        )


def cache_room(deployment: Deployment) -> CacheRoom:
    """The room for the cache on the GPUs of ``deployment``."""
    engine, machine = deployment.engine, deployment.cluster.machine
    whole, free = float(machine.memory[-1].usable), engine.memory == "free"
    usable = whole if free else whole * engine.memory_share
    draft = deployment.draft
    weights = deployment.weight_bytes() + (draft.weight_bytes() if draft else 0.0)
    activations = _activation_bytes(deployment)
    reserve = _PROFILED if engine.memory == "profiled" else _CONTEXT
    reserve += _PER_GPU_OF_GROUP if deployment.parallel.gpus > 1 else 0.0
    left = max(usable - weights - activations - reserve, 0.0) * (engine.memory_share if free else 1.0)
    size = deployment.cache_bytes() + (draft.cache_bytes() if draft else 0.0)
    tokens = int(left / size) * deployment.parallel.attention_dp if size else 1 << 40
    return CacheRoom(usable, weights, activations, reserve, left, tokens // engine.block * engine.block)


def _activation_bytes(deployment: Deployment) -> float:
    """Largest tensors of a step with the whole token budget: two of the widest block, and the residual stream."""
    model = deployment.model
    rows = deployment.engine.token_budget
    widest = max(
        (getattr(layer.block, "inner", 0) * getattr(layer.block, "per_token", 1) for layer, _ in model.layers),
        default=0,
    )
    scores = min(deployment.engine.sequences, 1024) * model.vocabulary * 4 / deployment.parallel.tp
    return rows * (3 * widest / deployment.parallel.tp + 4 * model.hidden) * 2.0 + scores
