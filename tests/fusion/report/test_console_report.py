"""What people read: the same records as the JSON."""

from __future__ import annotations

from fusion.analysis.analyzer import NOT_TUNED, LayerReport, NetworkAnalysis, OtherOperator, SiteReport
from fusion.comparing.compare import Comparison
from fusion.comparing.layer_table import LayerRow, LayerTable
from fusion.comparing.timing import Sampling
from fusion.report.console_report import precision_lines, print_analysis, print_comparison, window_text
from fusion.tuning.summary import _decision as site_decision


def test_operators_that_no_kernel_takes_in_are_counted_in_all_and_for_each_reason(capsys):
    others = (
        OtherOperator("gate", "relax.multiply", "an operand has another shape than the result"),
        OtherOperator("up", "relax.image.resize2d", "no template computes it"),
        OtherOperator("gate_2", "relax.multiply", "an operand has another shape than the result"),
        OtherOperator("sum", "relax.multiply", "follows no layer that has an epilogue"),
    )
    print_analysis(NetworkAnalysis("toy", 1, (), 5, others, notes=("two layers are in floats",)))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not covered by a template, compiled parallel and vectorised: 3 multiply, 1 image.resize2d",
        "  an operand has another shape than the result: 2 multiply",
        "  no template computes it: 1 image.resize2d",
        "  follows no layer that has an epilogue: 1 multiply",
        "note: two layers are in floats",
    ]


def test_windows_are_told_with_their_strides_and_dilations():
    assert window_text((3, 3), (1, 1)) == "3x3" and window_text((3, 3), (2, 2)) == "3x3/2"
    assert window_text((1, 5), (1, 2)) == "1x5/1x2" and window_text((3, 3), (1, 1), (4, 2)) == "3x3 d4x2"


def site(name: str, hopeless: bool) -> SiteReport:
    layers = tuple(LayerReport(f"{name}.{i}", "dense", (3, 3), (1, 1), (1, 8, 4, 4), (1, 8, 4, 4)) for i in range(2))
    reason = f"no gain: of {name}" + "; " + NOT_TUNED * hopeless
    return SiteReport(
        name, "dense-dense", layers, 1, 1.0, 2.0, (), 1.0, 1e-6, 1e-6, ("compute",), "compute", False, reason, hopeless
    )


def test_sites_that_are_never_tuned_are_one_line_unless_all_are_asked_for(capsys):
    sites = (site("a", False), site("b", True), site("c", True))
    print_analysis(NetworkAnalysis("toy", 1, sites, 5, ()))
    short = capsys.readouterr().out
    assert f"2 sites {NOT_TUNED} (2 dense-dense); --all lists them" in " ".join(short.split())
    assert "of a" in short and "of b" not in short and "of c" not in short
    print_analysis(NetworkAnalysis("toy", 1, sites, 5, ()), everything=True)
    whole = capsys.readouterr().out
    assert all(f"of {name}" in whole for name in "abc") and "--all" not in whole
    print_analysis(NetworkAnalysis("toy", 1, sites[1:], 5, ()))
    assert "decision" not in capsys.readouterr().out  # no table of nothing


def test_layers_are_listed_by_what_they_lose_and_gains_are_one_line(capsys):
    def row(layers: tuple[str, ...], ours: float | None, theirs: float | None) -> LayerRow:
        return LayerRow(layers, ours, theirs, (ours or 0) - (theirs or 0), ("gemm_1",), ())

    rows = (row(("/n/a/Conv", "/n/a/Relu", "/n/a/Add"), 9e-6, 2e-6), row(("/n/b/Conv",), 1e-6, 5e-6))
    others = row((), None, 1e-6)
    table = LayerTable("peer", rows, others, 1e-5, 8e-6, 2e-5, 4e-5, 7e-6, 5e-6)
    print_comparison(Comparison("m.onnx", 2, Sampling(), (), (), layers=table, layers_missing=("torch: none",)))
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first = told.index("by layer, 2 us slower than peer: 7 us lost in some, 5 us gained in others")
    sums = "layers of tuned sum to 20 us of 10 us, those of peer to 40 us of 8 us"
    assert told[first + 1 :] == [
        "layers tuned us peer us lost us kernels of tuned | peer",
        "a/Conv + a/Relu + and 1 more 9.0 2.0 7.0 gemm_1 | none",
        "1 gained 1.0 5.0 -4.0",
        "others (conversions of layouts, what no node is known of) - 1.0 -1.0 gemm_1 | none",
        f"{sums}; both are scaled to the network's median",
        "torch: none",
    ]


def test_sites_that_were_not_measured_say_why_they_are_apart_or_not():
    """Of two with the same figures, none measured, one is fused by what records say and the other is not."""
    assert site_decision(None, 1e-6, True, True).startswith("fused: predicted to be faster")
    assert site_decision(None, 1e-6, False, False).endswith("and no records of them say that it pays")


def test_one_error_is_told_of_layers_that_are_stored_narrower():
    errors = {"max_relative_error": 0.01, "mean_relative_error": 0.001, "cosine": None, "top1_agreement": None}
    precision = {"asked": "int8", "int8_layers": 1, "layers": 1, "max_error": None, "float32_layers": []}
    lines = precision_lines({**precision, "errors": {**errors, "compared_inputs": 1}})
    assert lines[1] == "errors over 1 input, of the largest value of an output: largest 0.01, mean 0.001"
