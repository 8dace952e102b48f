"""What people read: the same records as the JSON."""

from __future__ import annotations

from fusion.analysis.analyzer import NetworkAnalysis, OtherOperator
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
