from __future__ import annotations

import pytest

from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS, CollectiveTransfer


@pytest.mark.parametrize(
    ("transfer", "wire"),
    [
        (CollectiveTransfer("all_reduce", 800, 8), 1400),  # 2 (n - 1) / n
        (CollectiveTransfer("all_gather", 100, 8), 700),  # seven shards of others arrive
        (CollectiveTransfer("reduce_scatter", 800, 8), 700),
        (CollectiveTransfer("all_to_all", 800, 8), 700),
        (CollectiveTransfer("all_to_all", 800, 8, busiest_bytes=750), 750),
        (CollectiveTransfer("broadcast", 800, 8), 800),
        (CollectiveTransfer("reduce", 800, 8), 800),
        (CollectiveTransfer("send_recv", 800, 2), 800),
        (CollectiveTransfer("barrier", 800, 8), 0),
        (CollectiveTransfer("all_reduce", 800, 1), 0),
    ],
)
def test_bytes_of_the_busiest_rank(transfer, wire):
    assert transfer.wire_bytes == pytest.approx(wire)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gather", 1, 2), "unknown collective 'gather'"),
        (("all_reduce", -1, 2), "size_bytes"),
        (("all_reduce", float("nan"), 2), "size_bytes"),
        (("all_reduce", 1, 0), "need 1 <= nodes <= ranks"),
        (("all_reduce", 1, 2, 3), "need 1 <= nodes <= ranks"),
        (("all_reduce", 1, 2, 1, 5.0), "busiest_bytes is for all_to_all"),
        (("all_to_all", 1, 2, 1, -5.0), "busiest_bytes must be"),
        (("all_reduce", 1, 2, 1, None, 0), "sharing"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CollectiveTransfer(*arguments)


def test_records_round_trip():
    for kind in COLLECTIVE_KINDS:
        transfer = CollectiveTransfer(kind, 512, 8, 2, sharing=3)
        assert from_record(to_record(transfer)) == transfer


def test_ranks_of_the_fullest_node():
    assert CollectiveTransfer("all_reduce", 1, 9, 2).ranks_per_node == 5
