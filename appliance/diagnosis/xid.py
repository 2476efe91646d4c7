"""The Xid table: what a number in `NVRM: Xid (...)` means for us.

Numbers and names: `nverror.h` of NVIDIA's open kernel modules 595.45 and NVIDIA's Xid catalogue; the reading of each is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.causes import Cause


@dataclass(frozen=True, slots=True)
class XidMeaning:
    """One row: the driver's word for it, the cause if it is the first fault, and its depth."""

    word: str
    cause: Cause | None
    tier: int
    rank: int
    lasting: bool = False
    """The card stays silent until a reset or reboot: whatever fails later on it follows from this."""


def _rows(codes: tuple[int, ...], meaning: XidMeaning) -> dict[int, XidMeaning]:
    return dict.fromkeys(codes, meaning)


_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135)

XIDS: dict[int, XidMeaning] = {
    13: XidMeaning("graphics engine exception", Cause.CUDA_ILLEGAL_ACCESS, 1, 10),
    31: XidMeaning("GPU memory page fault", Cause.CUDA_ILLEGAL_ACCESS, 1, 11),
    **_rows((11, 25, 32, 69, 80, 141), XidMeaning("invalid or corrupted command stream", Cause.CUDA_ILLEGAL_ACCESS, 1, 12)),
    **_rows(_COPY_ENGINES, XidMeaning("copy engine exception", Cause.CUDA_ILLEGAL_ACCESS, 1, 13)),
    8: XidMeaning("the GPU stopped processing", Cause.GPU_HANG_RC, 1, 20),
    109: XidMeaning("context switch time-out", Cause.GPU_HANG_RC, 1, 21),
    46: XidMeaning("GPU time-out", Cause.GPU_HANG_RC, 1, 22),
    43: XidMeaning("channel reset after a fault of the application", Cause.CUDA_ILLEGAL_ACCESS, 6, 40),
    45: XidMeaning("channels removed because their process ended", Cause.OK_BENIGN_WARNING, 7, 50),
    48: XidMeaning("double-bit ECC error", Cause.ECC_UNCORRECTABLE, 0, 20, lasting=True),
    171: XidMeaning("uncorrectable DRAM error", Cause.ECC_UNCORRECTABLE, 0, 21, lasting=True),
    172: XidMeaning("uncorrectable SRAM error", Cause.ECC_UNCORRECTABLE, 0, 21, lasting=True),
    64: XidMeaning("row remapping or page retirement failed", Cause.ECC_UNCORRECTABLE, 0, 22, lasting=True),
    157: XidMeaning("resource retirement failed", Cause.ECC_UNCORRECTABLE, 0, 22, lasting=True),
    140: XidMeaning("unrecovered ECC error", Cause.ECC_UNCORRECTABLE, 0, 23, lasting=True),
    95: XidMeaning("uncontained memory error", Cause.ECC_UNCORRECTABLE, 0, 24, lasting=True),
    94: XidMeaning("contained memory error", Cause.ECC_UNCORRECTABLE, 0, 25),
    **_rows((63, 92, 93, 156, 160), XidMeaning("memory row marked for remapping", Cause.OK_DEGRADED, 7, 10)),
    74: XidMeaning("NVLink error", Cause.NVLINK_ERROR, 0, 30, lasting=True),
    **_rows((144, 145, 146, 147, 148, 149, 150, 155, 136), XidMeaning("NVLink error", Cause.NVLINK_ERROR, 0, 31, lasting=True)),
    137: XidMeaning("NVLink privilege error", Cause.NVLINK_ERROR, 1, 60),
    167: XidMeaning("fatal PCIe time-out", Cause.PCIE_ERROR, 0, 10, lasting=True),
    176: XidMeaning("PCIe correctable errors past the limit", Cause.PCIE_ERROR, 0, 11),
    79: XidMeaning("the GPU has fallen off the bus", Cause.GPU_OFF_BUS, 0, 40, lasting=True),
    119: XidMeaning("GSP RPC time-out", Cause.GSP_TIMEOUT, 0, 50, lasting=True),
    120: XidMeaning("GSP error", Cause.GSP_TIMEOUT, 0, 51, lasting=True),
    62: XidMeaning("micro-controller halt", Cause.GPU_MCU_HALT, 0, 60, lasting=True),
    169: XidMeaning("security micro-controller halt", Cause.GPU_MCU_HALT, 0, 61, lasting=True),
    **_rows((38, 44, 110, 143, 158, 175), XidMeaning("the GPU needs a reset", Cause.GPU_NEEDS_RESET, 1, 70, lasting=True)),
    54: XidMeaning("auxiliary power is not connected", Cause.PCIE_ERROR, 0, 15, lasting=True),
    154: XidMeaning("recovery action changed", Cause.GPU_NEEDS_RESET, 6, 10),
}

APPLICATION_CLASS = frozenset({8, 13, 31, 32, 39, 40, 41, 43, 45, 68, 69, 109})
"""Numbers that an application can cause on a healthy card: another program's are not evidence against ours."""

UNKNOWN_XID = XidMeaning("an Xid outside our table", None, 6, 50)


def meaning_of(code: int) -> XidMeaning:
    """The row of this number; an unknown one is kept as a weak hint and never a cause."""
    return XIDS.get(code, UNKNOWN_XID)
