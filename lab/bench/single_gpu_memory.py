"""Published memory of training steps on one GPU against ``predict``: ``python -m lab.bench.single_gpu_memory``.

Hugging Face's guides "Model training anatomy" and "Efficient training on a single GPU" (Transformers, docs/source/en,
of version 4.15 to 4.40): BERT large on sequences of 512 tokens with the Trainer on one V100 of 16 GB, January 2022,
FP32 or FP16 by autocast, AdamW with clipped gradients, micro-batches accumulated, layers recomputed or not. Their
figures are ``nvidia-smi``'s of the whole GPU; the CUDA context and its kernels, 1,343 MB by the guide, are taken off:
what is left is what PyTorch's allocator had reserved. Nothing is fitted to them. That Trainer cleared gradients by
zeros in place (PyTorch 1.10), and its AdamW updated one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
CONTEXT_MB = 1343
LENGTH = 512


@dataclass(frozen=True)
class Published:
    """Published figure. ``occupied``: MB of the whole GPU; a step is ``rounds`` micro-batches of ``batch``
    sequences.
    """

    name: str
    occupied: int
    batch: int
    rounds: int = 1
    recomputed: bool = False
    half: bool = False


PUBLISHED = (
    Published("batch 4", 14949, 4),
    Published("batch 1, 4 accumulated", 8681, 1, 4),
    Published("batch 1, 4 accumulated, recomputed", 6775, 1, 4, recomputed=True),
    Published("batch 4, FP16 autocast", 13939, 4, half=True),
    Published("batch 1, 4 accumulated, recomputed, FP16", 7275, 1, 4, recomputed=True, half=True),
)


def step_of(row: Published) -> Callable[[], tuple[Any, Callable[[], None]]]:
    """Function for ``--script``: makes the model and its step."""

    def make_step() -> tuple[Any, Callable[[], None]]:
        import torch
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=30522
        )
        model = BertForSequenceClassification._from_config(config, attn_implementation="eager").to("cuda")
        if row.recomputed:
            model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        scaler = torch.amp.GradScaler("cuda", enabled=row.half)
        batches = [torch.randint(0, 100, (row.batch, LENGTH), device="cuda") for _ in range(row.rounds)]
        labels = torch.zeros(row.batch, dtype=torch.long, device="cuda")

        def step() -> None:
            for ids in batches:
                with torch.autocast("cuda", dtype=torch.float16, enabled=row.half):
                    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
                scaler.scale(loss / row.rounds).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)

        return model, step

    return make_step


def main() -> None:
    """Print one line per published figure."""
    from e2e import predict

    errors = []
    print(f"{'':42} {'published':>10} {'reserved':>10} {'error':>7} {'in use':>10}")
    for row in PUBLISHED:
        rank = predict(script=step_of(row), gpu="v100-sxm2-16gb").ranks[0]
        reserved = (rank.peak_memory_bytes or 0) / MIB
        used = reserved - (rank.memory_breakdown or {}).get("reserve", 0) / MIB
        published = row.occupied - CONTEXT_MB
        errors.append(reserved / published - 1)
        print(f"{row.name:42} {published:7} MB {reserved:7.0f} MB {errors[-1]:+7.1%} {used:7.0f} MB")
    print(f"mean error {sum(map(abs, errors)) / len(errors):.1%}")


if __name__ == "__main__":
    main()
