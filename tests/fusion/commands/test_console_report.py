"""What people read: the same records as the JSON."""

from __future__ import annotations

from fusion.analysis.analyzer import LayerReport, NetworkAnalysis, OtherOperator, SiteReport
from fusion.analysis.reasons import NOT_TUNED
from fusion.commands.console_report import print_analysis


def test_operators_that_no_kernel_takes_in_are_counted_in_all_and_for_each_reason(capsys):
    others = (
        OtherOperator("gate", "relax.multiply", "an operand has another shape than the result"),
        OtherOperator("up", "relax.image.resize2d", "no template computes it"),
        OtherOperator("gate_2", "relax.multiply", "an operand has another shape than the result"),
        OtherOperator("sum", "relax.multiply", "follows no layer that has an epilogue"),
    )
    print_analysis(NetworkAnalysis("toy", 1, (), 5, others))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not covered by a template, compiled parallel and vectorised: 3 multiply, 1 image.resize2d",
        "  an operand has another shape than the result: 2 multiply",
        "  no template computes it: 1 image.resize2d",
        "  follows no layer that has an epilogue: 1 multiply",
    ]


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
