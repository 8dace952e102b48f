"""Recorded jobs predicted from their operators: the goals of the papers' own headline, on the public recordings."""

from __future__ import annotations

import pytest

from lab.validate.recorded_jobs import PredictedJobs, RankResult, jobs_section
from tests.e2e.recorded_traces import DATA, DLRM, recorded


@pytest.mark.thorough
def test_eight_ranks_are_predicted_by_their_own_table_and_by_that_of_the_others() -> None:
    recorded(DLRM)
    section = jobs_section(DATA.parent, "v100-sxm2-32gb/v100-torchrec-dlrm")
    assert section is not None
    found = section.results
    assert [each.rank for each in found] == list(range(8))
    # The goals are 6 % and 15 %; a tenth of what was reached may be lost.
    assert max(abs(each.own_error) for each in found) < 0.048
    assert max(abs(each.left_out_error) for each in found) < 0.052
    # 1,633 operator records of about 0.57 us each, of which nearly all are on the critical path.
    assert all(0.0007 < each.profiler_seconds < 0.001 for each in found)


def test_the_record_has_errors_and_means() -> None:
    ranks = [RankResult("job", "gpu", 0, 2.0, 2.2, 1.8, 0.1), RankResult("job", "gpu", 1, 2.0, 2.0, 1.0, 0.1)]
    document = PredictedJobs(ranks).record()
    assert [row["own_error"] for row in document["ranks"]] == pytest.approx([0.1, 0.0])
    assert document["mean_errors"]["job"] == pytest.approx({"own": 0.05, "left_out": 0.3})
