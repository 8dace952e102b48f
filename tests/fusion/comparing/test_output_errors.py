"""Errors of outputs by hand-made arrays whose figures are mental arithmetic."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fusion.comparing.output_errors import ErrorTally, errors_json, errors_over, is_of_scores, output_errors


@pytest.mark.parametrize(
    ("actual", "expected", "maximum", "relative", "mean"),
    [
        ([1.0, 2.0], [1.0, 4.0], 2.0, 0.5, 0.25),
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0, 0.0),
        ([0.25, 0.0], [0.0, 0.0], 0.25, 0.25, 0.125),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0, 0.0, 0.0),
        ([np.nan, np.inf, 3.0, 4.0], [np.nan, np.inf, 3.0, 8.0], 4.0, 0.5, 0.125),
        ([np.nan, 1.0], [1.0, 1.0], np.inf, np.inf, np.inf),
        ([1.0], [1.0, 1.0], np.inf, np.inf, np.inf),
        ([7, 2, 3, 4], [900, 2, 3, 4], 893.0, 0.25, 0.25),  # one class of four is another one
        ([True, False], [True, True], 1.0, 0.5, 0.5),
        ([1], [1, 2], np.inf, np.inf, np.inf),
    ],
)
def test_largest_and_mean_errors(actual, expected, maximum, relative, mean):
    errors = output_errors({"y": np.array(actual)}, {"y": np.array(expected)})
    found = (errors.max_abs_error, errors.max_relative_error, errors.mean_relative_error)
    assert found == (maximum, relative, mean)
    assert errors.comparable == np.isfinite(maximum)


def test_a_missing_output_has_infinite_errors_and_no_agreement():
    errors = output_errors({}, {"y": np.ones((2, 3))})
    assert (errors.max_abs_error, errors.cosine, errors.top1_agreement) == (np.inf, 0.0, 0.0)
    assert not errors.comparable


def test_the_cosine_is_that_of_the_worst_output():
    reference = {"x": np.array([1.0, 0.0]), "y": np.array([1.0, 1.0]), "classes": np.array([3, 4])}
    turned = {"x": np.array([5.0, 0.0]), "y": np.array([1.0, 0.0]), "classes": np.array([4, 3])}
    assert output_errors(turned, reference).cosine == pytest.approx(0.5**0.5)
    assert output_errors({"y": np.zeros(2)}, {"y": np.zeros(2)}).cosine == 1.0
    assert output_errors({"y": np.zeros(2)}, {"y": np.ones(2)}).cosine == 0.0
    assert output_errors({"y": np.array([1, 2])}, {"y": np.array([1, 2])}).cosine is None
    huge = np.array([1e200, 1e200])
    assert output_errors({"y": huge}, {"y": huge}).cosine == pytest.approx(1.0)


def test_top_1_counts_samples_and_takes_any_of_equal_scores():
    reference = np.array([[1.0, 3.0, 3.0], [9.0, 1.0, 1.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    actual = np.array([[1.0, 2.9, 3.0], [8.0, 8.5, 1.0], [0.0, 0.0, 5.0], [1.0, 0.0, 0.0]])
    assert output_errors({"y": actual}, {"y": reference}).top1_agreement == 0.75
    deep = {"y": actual[:, :, None, None]}
    assert output_errors(deep, {"y": reference[:, :, None, None]}).top1_agreement == 0.75


def test_what_has_scores():
    assert is_of_scores(np.zeros((1, 1000))) and is_of_scores(np.zeros((8, 10, 1, 1)))
    assert not is_of_scores(np.zeros((1, 1)))  # one score is always the greatest
    assert not is_of_scores(np.zeros((1, 21, 4, 4))) and not is_of_scores(np.zeros(7))
    assert not is_of_scores(np.zeros((1, 10), np.int64))
    assert output_errors({"y": np.zeros((1, 3, 2))}, {"y": np.zeros((1, 3, 2))}).top1_agreement is None


def test_over_inputs_the_largest_error_the_least_cosine_and_means_of_the_others():
    references = [{"y": np.array([[2.0, 0.0]])}, {"y": np.array([[0.0, 10.0]])}]
    actual = [{"y": np.array([[1.0, 0.0]])}, {"y": np.array([[11.0, 10.0]])}]
    errors = errors_over(actual, references)
    assert errors.max_abs_error == 11.0 and errors.max_relative_error == 1.1
    assert errors.mean_relative_error == pytest.approx((0.25 + 0.55) / 2)
    assert errors.cosine == pytest.approx(10 / (11**2 + 10**2) ** 0.5)
    assert errors.top1_agreement == 0.5 and errors.compared_inputs == 2
    tally = ErrorTally()
    for ours, theirs in zip(actual, references, strict=True):
        tally.add(ours, theirs)
    assert tally.errors() == errors
    with pytest.raises(ValueError, match="longer|shorter"):
        errors_over(actual[:1], references)


def test_sixteen_bits_against_double_precision():
    reference = {"y": np.array([[1.0, 0.5]])}
    assert output_errors({"y": np.array([[1.0, 0.75]], np.float16)}, reference).max_relative_error == 0.25


def test_json_has_the_same_keys_where_nothing_was_compared():
    errors = output_errors({"y": np.ones((1, 2))}, {"y": np.ones((1, 2))})
    document = json.loads(json.dumps(errors_json(errors), allow_nan=False))
    assert document["top1_agreement"] == 1.0 and document["compared_inputs"] == 1
    assert errors_json(None) == dict.fromkeys(document)
