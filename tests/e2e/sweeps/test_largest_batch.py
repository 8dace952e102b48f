"""The largest batch that fits, found in few tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.sweeps.advice import LARGEST, TRIES, largest_batch


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 100_000), st.integers(1, 64))
def test_where_memory_grows_evenly_it_is_exact(fixed, each, capacity, begin):
    tried = []

    def needed(batch: int) -> int:
        tried.append(batch)
        return fixed + each * batch

    found = largest_batch(needed, capacity, (begin, fixed + each * begin))
    assert found.batch_size == max((capacity - fixed) // each, 0) and not found.at_least
    assert len(tried) <= TRIES and len(set(tried)) == len(tried)
    assert found.allocated_bytes == fixed + each * max(found.batch_size, 1)


def test_memory_that_grows_in_steps_is_found_too():
    """As an allocator's blocks make it."""

    def needed(batch: int) -> int:
        return 100 + -(-7 * batch // 64) * 64

    found = largest_batch(needed, 10_000, (1, needed(1)))
    assert needed(found.batch_size) <= 10_000 < needed(found.batch_size + 1)


def test_it_says_where_more_may_fit_and_where_nothing_does():
    assert largest_batch(lambda batch: 5, 10, (1, 5)).batch_size == LARGEST
    assert largest_batch(lambda batch: 5, 10, (1, 5)).at_least
    none = largest_batch(lambda batch: 10 + batch, 10, (64, 74))
    assert (none.batch_size, none.allocated_bytes) == (0, 11)


def test_a_search_that_is_stopped_says_what_it_knows():
    stopped = largest_batch(lambda batch: batch, 1000, (1, 1), stop=lambda: True)
    assert stopped is not None and (stopped.batch_size, stopped.at_least) == (1, True)
    assert largest_batch(lambda batch: batch, 1000, (4096, 4096), stop=lambda: True) is None


@pytest.mark.parametrize("begin", [1, 300])
def test_memory_that_grows_with_the_square_ends_within_its_tries(begin):
    found = largest_batch(lambda batch: batch * batch, 10_000, (begin, begin * begin))
    assert (found.batch_size, found.at_least) == (100, False)
