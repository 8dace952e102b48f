"""The draw of rows that no fit sees."""

from lab.data.selection import KEYS, is_sealed

TABLE = "whole_step/llm_training_kinds.csv"


def _row(model: str, gpus: int = 512) -> dict[str, str]:
    return {"source": "dgxc-benchmarking", "model": model, "gpu": "H100", "n_gpus": str(gpus), "seq": ""}


def test_one_job_under_several_names_is_drawn_once() -> None:
    names = ("Grok 1 314b Dev BF16", "Grok1 314b FP8", "Grok 1 314b FP8 PROXY (fewer layers)")
    for gpus in range(8, 200, 8):
        assert len({is_sealed(TABLE, _row(name, gpus)) for name in names}) == 1


def test_the_draw_does_not_move() -> None:
    """Rows drawn in 2026 stay drawn: a changed seed would open them without a word."""
    assert is_sealed(TABLE, _row("Grok 1 314b BF16", 512))
    assert not is_sealed(TABLE, _row("Grok 1 314b BF16", 64))


def test_about_one_job_in_four_is_drawn() -> None:
    drawn = [is_sealed("megatron_golden/a100.csv.gz", {"case": str(number)}) for number in range(2000)]
    assert 0.22 < sum(drawn) / len(drawn) < 0.28
    assert set(KEYS) >= {TABLE}
