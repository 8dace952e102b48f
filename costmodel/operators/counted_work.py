"""What every operator counts of its work, whatever it computes: the sizes that cost models price by."""

from __future__ import annotations


class CountedWork:
    """An operator that says how much there is to compute and to move."""

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-accumulate counts as two."""
        raise NotImplementedError

    @property
    def read_bytes(self) -> int:
        """Bytes that must come into the chip at least once if nothing is cached from before."""
        raise NotImplementedError

    @property
    def write_bytes(self) -> int:
        """Bytes that must leave the chip at least once."""
        raise NotImplementedError


class LayerWork:
    """A layer of a network from one tensor to another, whose sizes are told tensor by tensor."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input as the framework has it, channels unpadded."""
        raise NotImplementedError

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output as the framework has it, channels unpadded."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Floating-point operations without those of the epilogue; a multiply-accumulate counts as two."""
        raise NotImplementedError

    @property
    def input_bytes(self) -> int:
        """Bytes of the input."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and biases; 0 of a layer that has none."""
        raise NotImplementedError

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        raise NotImplementedError

    @property
    def residual_bytes(self) -> int:
        """Bytes of the tensor that the epilogue adds; 0 where it adds none."""
        raise NotImplementedError
