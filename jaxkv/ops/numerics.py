"""How numbers are computed: one frozen value, so that no two parts of a step can disagree about it."""

import dataclasses

from pallas_kernels.options import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Which implementation runs, and whether a row's bits may depend on the rows beside it; static under jit.

    What attends carries it (`Dense`, `Paged`); products, norms and logits read it there.

    Args:
      implementation: of all three operations, see `pallas_kernels.paged_attention`; None is the best one of the platform. Mosaic's
        kernel has Triton's writer, and products, which have no GPU kernel of their own, are XLA's with all but "cpu".
      deterministic: rows are computed in tiles of fixed size and attention splits at fixed positions, so that a row's bits depend on
        its own tokens alone.

    Raises:
      ValueError: the implementation has an unknown name.
    """

    implementation: str | None = None
    deterministic: bool = False

    def __post_init__(self):
        if self.implementation is not None and self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {self.implementation!r}")

    @property
    def product(self) -> str | None:
        """The implementation of products that goes with `implementation`."""
        return self.implementation if self.implementation in (None, "cpu") else "xla"


DEFAULT = Numerics()
"""The best implementation of the platform, and no promise about bits."""
