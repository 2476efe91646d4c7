"""`python -m appliance.gpu.nvml_child`: ask NVML once, print one line of JSON, end. Runs in a child because NVML may hang."""

from __future__ import annotations

import json
from typing import Any

NO_LIBRARY = 12


def report() -> dict[str, Any]:
    """As read by nvml.read_report."""
    try:
        import pynvml
    except ImportError:
        return {"code": NO_LIBRARY, "problem": "the Python package nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
        gpus = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {"code": 0, "problem": "", "driver": str(pynvml.nvmlSystemGetDriverVersion()), "gpus": gpus}
    except pynvml.NVMLError as error:
        return {"code": int(error.value), "problem": str(error)}


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found["pci_bus_id"] = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        found["uuid"] = str(pynvml.nvmlDeviceGetUUID(handle))
        found["name"] = str(pynvml.nvmlDeviceGetName(handle))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found["total_bytes"], found["free_bytes"] = int(memory.total), int(memory.free)
    except pynvml.NVMLError as error:
        found["problem"] = str(error)
        return found
    try:
        found["persistence"] = bool(pynvml.nvmlDeviceGetPersistenceMode(handle))
    except pynvml.NVMLError:
        found["persistence"] = None  # not supported here: an absent number, not a fault
    return found


if __name__ == "__main__":
    print(json.dumps(report()), flush=True)
