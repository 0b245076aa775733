"""Number formats of a server's weights, and what each costs in quality. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Weights = Literal["bf16", "fp8", "int8", "int4", "fp4", "mxfp4"]
_QUALITY = "Kurtic et al., arXiv 2411.02355, over 500,000 evaluations of Llama 3.1"


@dataclass(frozen=True, kw_only=True)
class Format:
    """Of the matrices of the layers; embedding, head and norms stay in bf16."""

    name: Weights
    bits: float
    """of a weight, its share of the scales included"""
    input_bytes: float = 2.0
    """of what meets the weight in a product"""
    rate: Literal["bf16", "fp8", "fp4"] = "bf16"
    """whose peak the products have, on a device that has it"""
    experts_only: bool = False
    """whether the makers of mixtures keep all but the experts in bf16"""
    quality: str

    @property
    def num_bytes(self) -> float:
        """Of a weight."""
        return self.bits / 8


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format(name="bf16", bits=16, quality="as trained"),
        Format(
            name="fp8",
            bits=8,
            input_bytes=1,
            rate="fp8",
            quality=f"no loss that was measured ({_QUALITY})",
        ),
        Format(
            name="int8",
            bits=8,
            input_bytes=1,
            rate="fp8",
            quality=f"1 to 3% lower scores, when calibrated well ({_QUALITY})",
        ),
        Format(  # groups of 128 share a scale of 16 bits and a zero
            name="int4",
            bits=4.25,
            experts_only=True,
            quality=f"near to 8 bits, less so on hard tasks; weights only ({_QUALITY})",
        ),
        Format(  # groups of 16 share a scale of 8 bits
            name="fp4",
            bits=4.5,
            input_bytes=0.5625,
            rate="fp4",
            experts_only=True,
            quality="depends on the model and its calibration; fast on Blackwell devices alone",
        ),
        Format(  # groups of 32 share a scale of 8 bits
            name="mxfp4",
            bits=4.25,
            experts_only=True,
            quality="as trained, of models that are published in it",
        ),
    )
}
"""name -> format. A tensor of fp8 or int8 has one scale a row or block: less than 0.1 bit"""
