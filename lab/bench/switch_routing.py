"""Number of tokens processed by the experts of a switch transformer when all input tokens are the same.

NeuSight measured its switch transformer (24 + 24 layers, 4 experts of capacity 64) in this way. The full model has 5
billion weights; here narrower ones of the same depth with random weights are used: ``python -m
lab.bench.switch_routing``.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

LENGTH = 512
SHAPES = (
    {"d_model": 256, "d_kv": 32, "num_heads": 8, "d_ff": 1024},
    {"d_model": 512, "d_kv": 64, "num_heads": 8, "d_ff": 2048},
)
COMMON = {
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_sparse_encoder_layers": 12,
    "num_sparse_decoder_layers": 12,
    "num_experts": 4,
    "expert_capacity": 64,
    "vocab_size": 1000,
}


def main() -> None:
    """Print tokens and experts per sparse layer for each width and seed."""
    torch.set_num_threads(2)
    everything = []
    for seed in range(3):
        for shape in SHAPES:
            torch.manual_seed(seed)
            model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**COMMON, **shape)).eval()
            taken = routed(model)
            everything += taken
            used = statistics.mean(sum(count > 0 for count in layer) for layer in taken)
            tokens = statistics.mean(map(sum, taken))
            print(f"seed {seed}, {shape['d_model']} channels: {tokens:.1f} tokens, {used:.2f} experts a layer")
    used = statistics.mean(sum(count > 0 for count in layer) for layer in everything)
    print(f"all: {statistics.mean(map(sum, everything)):.1f} tokens, {used:.2f} experts a layer of {LENGTH} tokens")


def routed(model: torch.nn.Module) -> list[list[int]]:
    """Tokens processed by each expert, layer by layer. Other tokens pass unchanged, as in transformers 4.38."""
    found: list[list[int]] = []

    def forward(layer: Any, states: torch.Tensor) -> torch.Tensor:
        mask, probabilities, _ = layer.router(states)
        found.append(mask.sum((0, 1)).tolist())
        following = states.clone()
        for place, expert in enumerate(layer.experts.values()):
            chosen = mask[:, :, place].bool()
            if chosen.any():
                following[chosen] = expert(states[chosen])
        return probabilities * following

    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersSparseMLP":
            module.forward = forward.__get__(module)  # type: ignore[method-assign]
    ids = torch.ones((1, LENGTH), dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=ids, decoder_input_ids=ids)
    return found


if __name__ == "__main__":
    main()
