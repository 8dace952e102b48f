"""Work counts common to all operators: the sizes on which cost models base prices."""

from __future__ import annotations


class CountedWork:
    """Operator with counts of its computation and data movement."""

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-accumulate counts as two."""
        raise NotImplementedError

    @property
    def read_bytes(self) -> int:
        """Bytes that must be read into the chip at least once, with cold caches."""
        raise NotImplementedError

    @property
    def write_bytes(self) -> int:
        """Bytes that must be written out of the chip at least once."""
        raise NotImplementedError


class LayerWork:
    """Network layer from one tensor to another, with sizes tensor by tensor."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input as in the framework, channels unpadded."""
        raise NotImplementedError

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output as in the framework, channels unpadded."""
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
        """Bytes of weights and biases; 0 for a layer without any."""
        raise NotImplementedError

    @property
    def output_bytes(self) -> int:
        """Bytes of the output."""
        raise NotImplementedError

    @property
    def residual_bytes(self) -> int:
        """Bytes of the tensor that the epilogue adds; 0 if none."""
        raise NotImplementedError
