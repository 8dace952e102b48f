from __future__ import annotations

import dataclasses

import pytest
import yaml

from costmodel.base.errors import InputError, MachineError
from costmodel.collectives.collective_model import collective_cost_model
from costmodel.commands.cli import cluster_record, listing
from costmodel.machines.cluster import load_cluster
from costmodel.machines.cluster_file import (
    cluster_files,
    cluster_of_gpu,
    find_cluster,
    network_files,
    read_cluster,
    read_network,
)
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, load_machine, machine_files
from costmodel.operators.collective_transfer import CollectiveTransfer

FILE = {
    "name": "mine",
    "kind": "cluster",
    "description": "for tests",
    "machine": "l4",
    "gpus_per_node": 4,
    "intra_node": {"link": "pcie", "topology": "host", "bandwidth": "10 GB/s", "origin": "invented"},
    "network": {"name": "ethernet-100g", "cards_per_node": 2, "origin": "invented"},
}


def test_every_packaged_file_loads_with_its_gpu_and_network():
    assert {"dgx-a100", "dgx-h100", "dgx-1v", "l40s-pcie-8x", "aws-p4d", "azure-nd-a100-v4"} <= set(cluster_files())
    for name, path in cluster_files().items():
        file = read_cluster(path)
        cluster = load_cluster(name, 2 * file.gpus_per_node)
        assert file.name == path.stem and cluster.nodes == 2
        assert cluster.node_bandwidth() > 1e9 and cluster.machine.gpu is not None
    for path in network_files().values():
        network = read_network(path)
        assert network.name == path.stem and network.bandwidth <= (network.datasheet or 0)


def test_one_gpu_has_at_most_one_usual_cluster():
    usual = [file.machine for file in map(read_cluster, cluster_files().values()) if file.usual]
    assert len(usual) == len(set(usual))


def test_a_gpu_alone_stands_for_the_system_in_which_it_is_sold():
    assert load_cluster("h100-sxm", 8).name == "dgx-h100"
    assert load_cluster(load_machine("h100-sxm"), 8).name == "dgx-h100"
    cluster = load_cluster("h100-sxm", 1024)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (128, 8, 1024)
    spread = load_cluster("h100-sxm", 8, nodes=4)
    assert (spread.nodes, spread.gpus_per_node, spread.node_gpus) == (4, 2, 8)


def test_a_gpu_without_a_file_takes_its_fastest_link():
    cluster = load_cluster("l4", 8)
    assert cluster.topology == "host" and cluster.intra_node.kind == "pcie" and cluster.network is None
    assert cluster.usable_share(2) == 1 and cluster.usable_share(8) == pytest.approx(0.25)
    assert cluster.usable_share(4) == pytest.approx(0.5)
    with pytest.raises(InputError, match="2 nodes but no network; name one with --network"):
        load_cluster("l4", 16)
    with pytest.raises(MachineError, match="has no network"):
        cluster.node_bandwidth()


BRIDGED = [
    path.stem
    for path in sorted((PACKAGED_DIRECTORY / "gpu").glob("*.yaml"))
    if any(link.kind == "nvlink" and "bridge" in link.origin for link in load_machine(path.stem).links)
]


@pytest.mark.parametrize("name", BRIDGED)
def test_bridges_join_two_cards_and_all_others_share_the_host(name):
    machine = load_machine(name)
    (pcie,) = (link for link in machine.links if link.kind == "pcie")
    two, four = load_cluster(machine, 2), load_cluster(machine, 4)
    assert two.intra_node.bandwidth * two.usable_share(2) > pcie.bandwidth
    assert four.intra_node.bandwidth * four.usable_share(4) <= pcie.bandwidth * 1.001
    wide, narrow = (
        collective_cost_model(cluster).estimate([CollectiveTransfer("all_reduce", 2.0**28, ranks, 1)])[0]
        for cluster, ranks in ((four, 4), (two, 2))
    )
    assert wide.seconds > narrow.seconds
    if machine.name != "a100-pcie-80gb":  # the one whose server was measured
        assert wide.upper / wide.seconds > narrow.upper / narrow.seconds


def test_through_a_host_pairs_of_gpus_share_what_links_share_by_their_number():
    host = dataclasses.replace(load_cluster("l40s", 8), usable=((2, 1.0), (8, 1 / 28)))  # 1 pair, 28 pairs
    assert host.usable_share(4) == pytest.approx(1 / 6) and host.usable_share(3) == pytest.approx(1 / 3)
    links = dataclasses.replace(host, topology="mesh", usable=((2, 1.0), (8, 1 / 4)))
    assert links.usable_share(4) == pytest.approx(1 / 2)


def test_networks_by_name_and_number_of_cards():
    cluster = load_cluster("h100-sxm", 16, network="infiniband-hdr:4")
    assert cluster.network_cards == 4 and cluster.node_bandwidth() == pytest.approx(96e9)
    assert load_cluster("h100-sxm", 16, network="infiniband-hdr").network_cards == 8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("h100-sxm", 9, 2), InputError, "--gpus 9 does not fill 2 nodes evenly"),
        (("h100-sxm", 12), InputError, None),
        (("h100-sxm", 32, 2), InputError, "a node holds 8 GPUs.*--nodes 4"),
        (("h100-sxm", 0), InputError, "must be at least 1"),
        (("h100-sxm", 16, 2, "infiniband-ndr:0"), InputError, "number of cards"),
        (("h100-sxm", 16, 2, "infiniban"), MachineError, "did you mean infiniband"),
        (("dgx-h10", 8), MachineError, "unknown machine"),
        (("toy", 8), MachineError, "is no GPU"),
        (("no/such.yaml", 8), MachineError, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, message):
    if message is None:  # 12 GPUs: two nodes of six
        assert load_cluster(*arguments).gpus_per_node == 6
        return
    with pytest.raises(error, match=message):
        load_cluster(*arguments)


def test_the_users_own_cluster(user_machines, tmp_path):
    (user_machines / "cluster").mkdir(parents=True)
    (user_machines / "cluster" / "mine.yaml").write_text(yaml.safe_dump(FILE))
    cluster = load_cluster("mine", 8)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.intra_node.bandwidth) == (2, 4, 10e9)
    assert cluster.node_bandwidth() == pytest.approx(23e9)
    assert load_cluster(user_machines / "cluster" / "mine.yaml", 8) == cluster
    assert "mine" in {row["name"] for row in listing()}
    assert cluster_record("mine")["bandwidth"] == "10 GB/s" and cluster_record("no-such") is None
    assert cluster_record("infiniband-ndr")["datasheet"] == "50 GB/s"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(gpu="l4"), "gpu: unknown key"),
        (lambda d: d.pop("machine"), "machine: missing"),
        (lambda d: d.update(gpus_per_node=0), "gpus_per_node"),
        (lambda d: d["intra_node"].update(bandwidth="10 Gb/s"), "not in B/s"),
        (lambda d: d["intra_node"].update(usable={2: 1.5}), "usable"),
        (lambda d: d["intra_node"].update(link="nvlink"), "no nvlink link"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, change, message):
    content = yaml.safe_load(yaml.safe_dump(FILE))
    change(content)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(MachineError, match=message):
        load_cluster(path, 4)


def test_every_node_that_an_answer_names_can_be_looked_up():
    for gpu in (name for name, path in machine_files().items() if path.parent.name == "gpu"):
        try:
            usual = cluster_of_gpu(load_machine(gpu))
        except MachineError:  # without a link there is no node
            continue
        found = find_cluster(usual.name)
        assert found == usual and load_cluster(usual.name, 2).name == load_cluster(gpu, 2).name
    for none in ("nothing-node", "h100-sxm-node", "xeon-amx-2c-node", "-node"):
        assert find_cluster(none) is None


@pytest.mark.parametrize(("gpu", "near"), [("H100-SXM", "h100-sxm"), ("rtx4090", "rtx-4090"), ("qqqq", "")])
def test_an_unknown_gpu_is_refused_with_the_nearest_names_and_where_all_stand(gpu: str, near: str):
    with pytest.raises(MachineError, match="`python -m costmodel machines` lists all") as refused:
        load_machine(gpu)
    assert near in str(refused.value) and str(refused.value).count(",") <= 2


def test_a_node_has_as_many_cards_on_pcie_as_it_is_told_to_have() -> None:
    usual, told = load_cluster("a100-pcie-80gb", 8), load_cluster("a100-pcie-80gb", 8, 1)
    assert (usual.nodes, usual.gpus_per_node) == (2, 4) and (told.nodes, told.gpus_per_node) == (1, 8)
    assert told.topology == "pairs" and load_cluster("a100-pcie-80gb", 20, 2).network_name == usual.network_name
    assert load_cluster("l40s", 10, 1).nodes == 1 and load_cluster("h100-sxm", 16, 1).nodes == 2
    with pytest.raises(InputError, match="a node holds 4 GPUs"):
        load_cluster("a100-pairwise", 16, 2)
