from __future__ import annotations

import pytest
import yaml

from costmodel.base.errors import MachineError
from costmodel.machines.cluster import load_cluster, ring_links
from costmodel.machines.cluster_file import cluster_files, read_cluster

SQUARE = ((0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1))
FULL = ((0, 1, 1), (0, 2, 1), (0, 3, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1))


def test_rings_by_hand():
    assert ring_links(SQUARE, (0, 1)) == 1 and ring_links(SQUARE, (0, 2)) == 0
    assert ring_links(SQUARE, (0, 1, 2, 3)) == 2  # one ring, both ways
    assert ring_links(FULL, (0, 1, 2, 3)) == 2  # a second one would need one of its links again
    assert ring_links(tuple((a, b, 2) for a, b, _ in FULL), (0, 1, 2, 3)) == 6
    assert ring_links(FULL, (0, 1, 2)) == 2
    assert ring_links(((0, 1, 2), (1, 2, 2)), (0, 1, 2)) == 0


def test_the_cube_mesh_of_a_dgx_1():
    """Rings of the first GPUs of eight V100, of six links each; vTrain measured 2, 4 and 8 of them."""
    shares = {count: round(6 * share, 3) for count, share in load_cluster("dgx-1v", 8).usable}
    assert shares == {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}  # five GPUs have no ring


@pytest.mark.parametrize(
    "links",
    [[[0, 1, 1]], [[0, 0, 1]], [[0, 1, 1], [1, 0, 1]], [[0, 1]], [[0, 9, 1]]],
)
def test_links_that_make_no_sense_are_named(tmp_path, links):
    document = yaml.safe_load(cluster_files()["dgx-1v"].read_text())
    document["intra_node"]["links"] = links
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(MachineError, match="links"):
        read_cluster(path)
