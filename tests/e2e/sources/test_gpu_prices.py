"""``--price``: a number, or a file of prices."""

from __future__ import annotations

import pytest

from costmodel.base.errors import InputError
from e2e.sources.gpu_prices import asked_price, read_prices
from e2e.sources.requests import Model, Recording

FILE = """
date: 2026-11-01
origin: our contract
currency: EUR
per_gpu_hour:
  a100-sxm-40gb: 1.25
  dgx-h100: 3
"""


def test_a_file_names_gpus_by_what_was_asked_or_by_what_that_means(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(FILE)
    price = asked_price(str(path), Model("gpt2", gpu="a100-sxm-40gb")).of("a100-sxm-40gb")
    assert (price.per_gpu_hour, price.currency, price.origin, price.date) == (1.25, "EUR", "our contract", "2026-11-01")
    assert asked_price(str(path), Model("gpt2", gpu="dgx-h100")).of("h100-sxm").per_gpu_hour == 3
    assert asked_price(str(path), Recording("k.json")).of("a100-sxm-40gb").per_gpu_hour == 1.25  # a recording's own GPU
    with pytest.raises(InputError, match=r"prices.yaml: per_gpu_hour has no price of h200-sxm \(it has a100-sxm-40gb"):
        asked_price(str(path), Model("gpt2", gpu="h200-sxm"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FILE.replace("date: 2026-11-01", ""), "date"),
        (FILE.replace("1.25", "-1"), "a100-sxm-40gb"),
        (FILE.replace("currency", "money"), "money"),
        ("- 2", "expected date, origin and per_gpu_hour"),
    ],
)
def test_mistakes_of_a_file_name_it_and_the_key(tmp_path, text, told):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_prices(str(path))


def test_a_number_is_a_price_of_any_gpu():
    assert asked_price("2.5", Model("gpt2", gpu="l4")).of("l4").per_gpu_hour == 2.5
    for wrong in ("cheap", "0", "-1", "nan", "1e308"):
        with pytest.raises(InputError, match=f"--price {wrong}"):
            read_prices(wrong)
