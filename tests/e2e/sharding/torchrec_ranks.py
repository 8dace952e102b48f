"""One of the processes that train an EmbeddingBagCollection under a plan of ours, on CPUs.

    torchrec_ranks.py PLAN PORT RANK

Prints the largest difference of the sharded lookups from the unsharded ones.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from e2e.sharding.plan import load_plan, torchrec_plan

SAMPLES = 3


class Model(torch.nn.Module):
    """The collection alone."""

    def __init__(self, collection: torchrec.EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: torchrec.KeyedJaggedTensor) -> torchrec.KeyedTensor:
        return self.collection(features)


def copy_shards(weights: dict[str, torch.Tensor], sharded: dict[str, Any]) -> None:
    """Gives the shards of this rank their part of the whole tables: TorchRec does so on GPUs only."""
    for name, value in sharded.items():
        whole = weights[name.removeprefix("collection.")]
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
            value.copy_(whole)
            continue
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])


def main(rank: int, path: str, port: str) -> None:
    """One rank."""
    plan = load_plan(Path(path))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(plan.gpus))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(plan.gpus))
    dist.init_process_group("gloo", rank=rank, world_size=plan.gpus)
    torch.manual_seed(0)  # every rank starts from the same tables
    names = [table.placement.table for table in plan.tables]
    collection = torchrec.EmbeddingBagCollection(
        device=torch.device("cpu"),
        tables=[
            torchrec.EmbeddingBagConfig(table.rows, table.dim, name=name, feature_names=[name])
            for name, table in zip(names, plan.tables, strict=True)
        ],
    )
    indices = torch.stack([torch.randint(table.rows, (SAMPLES,)) for table in plan.tables])
    lengths = torch.ones(indices.numel(), dtype=torch.int64)
    features = torchrec.KeyedJaggedTensor(names, indices.flatten(), lengths=lengths)
    weights = {name: value.detach().clone() for name, value in collection.state_dict().items()}
    expected = {name: values.detach().clone() for name, values in collection(features).to_dict().items()}
    model = DistributedModelParallel(
        Model(collection),
        device=torch.device("cpu"),
        plan=torchrec_plan(plan, "collection", "cpu"),
        sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})],
    )
    with torch.no_grad():
        copy_shards(weights, model.module.state_dict())
    found = model(features).to_dict()
    torch.cat(list(found.values()), dim=1).sum().backward()
    print("difference", max(float((found[name] - expected[name]).abs().max()) for name in names))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[3]), sys.argv[1], sys.argv[2])
