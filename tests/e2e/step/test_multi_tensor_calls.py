"""Lists of tensors among an operator's inputs, and what an optimizer gathers."""

from __future__ import annotations

from e2e.step.operator_trace import OperatorCall, Tensor, gathering_calls

LIST = tuple(Tensor(number, number, (4,), "float32", "cuda:0") for number in range(7))


def call(number: int, name: str, *inputs) -> OperatorCall:
    return OperatorCall(number, name, None, 0, inputs)


def test_the_optimizer_gathers_once_a_step_for_each_group():
    calls = [
        call(0, "aten::mm"),
        call(1, "aten::zeros", (4,)),
        call(2, "aten::_foreach_mul_", LIST, 0.9),
        call(3, "aten::_foreach_add_", LIST, LIST),
        call(4, "aten::mm"),
        call(5, "aten::_foreach_add_", LIST[:2], LIST[:2]),
        call(6, "aten::_foreach_add_", LIST[:5], LIST[:5]),
        call(7, "aten::_foreach_mul_", LIST[:5], 0.9),
    ]
    phases = ["forward", "optimizer", "optimizer", "optimizer", "forward", "optimizer", "optimizer", "optimizer"]
    assert gathering_calls(calls, phases) == {2: 7, 5: 2, 6: 5}
    assert gathering_calls(calls, ["forward"] * 8) == {}
