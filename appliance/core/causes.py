"""The labels of docs/failures.md: a closed set, with each label's group and definition.

Source of the definitions: the project's collection of worked crash reports (docs/failures.md says where each is from).
"""

from __future__ import annotations

import enum


class Cause(enum.Enum):
    """Why the engine is not serving, or why a frightening log is harmless (`ok_*`)."""

    def __init__(self, label: str, group: str, definition: str) -> None:
        self.label = label
        self.group = group
        self.definition = definition

    @classmethod
    def of(cls, label: str) -> Cause:
        """The cause with this label.

        Raises:
            KeyError: no such label.
        """
        return _BY_LABEL[label]

    @property
    def is_ok(self) -> bool:
        """No crash: `diagnose` exits 0."""
        return self.label.startswith("ok_")

    # fmt: off
    CUDA_OOM_PREFILL = ("cuda_oom_prefill", "VRAM", "an allocation failed while a prompt was being processed")
    CUDA_OOM_RUNTIME = ("cuda_oom_runtime", "VRAM", "an allocation failed at run time, not tied to a prompt")
    CUDA_OOM_STARTUP = ("cuda_oom_startup", "VRAM", "weights, graph capture or workspaces do not fit while loading")
    KV_POOL_TOO_SMALL = ("kv_pool_too_small", "VRAM", "the engine refuses to start: the KV budget holds less than one full sequence")
    KV_POOL_EXHAUSTED = ("kv_pool_exhausted", "VRAM", "no token slots were left at run time (not a CUDA allocation)")
    VRAM_HELD_BY_OTHER = ("vram_held_by_other", "VRAM", "another process, or the previous engine, still holds memory of the card")
    HOST_OOM = ("host_oom", "host memory", "the kernel's OOM killer hit our process or starved it")
    KILLED_UNKNOWN = ("killed_unknown", "host memory", "SIGKILL without any OOM record and without our own stop")
    CUDA_ILLEGAL_ACCESS = ("cuda_illegal_access", "GPU software", "illegal or misaligned address, illegal instruction; Xid 13 or 31")
    CUDA_DEVICE_ASSERT = ("cuda_device_assert", "GPU software", "a device-side assertion with its own text")
    CUDA_LAUNCH_FAILURE = ("cuda_launch_failure", "GPU software", "unspecified launch failure without a better cause")
    CUBLAS_ERROR = ("cublas_error", "GPU software", "a cuBLAS status other than ALLOC_FAILED")
    GPU_HANG_RC = ("gpu_hang_rc", "GPU software", "the driver's watchdog killed a channel: Xid 8 or 109 as the first fault")
    NCCL_P2P_HANG = ("nccl_p2p_hang", "collectives", "the transport never worked: the first collective hangs")
    NCCL_TIMEOUT = ("nccl_timeout", "collectives", "a collective timed out after many good ones")
    NCCL_INIT_FAILURE = ("nccl_init_failure", "collectives", "NCCL returned an error at init or at the first call")
    SHM_TOO_SMALL = ("shm_too_small", "collectives", "/dev/shm is too small")
    P2P_UNSAFE = ("p2p_unsafe", "collectives", "peer traffic between the cards resets the machine")
    ENGINE_WATCHDOG = ("engine_watchdog", "engine time-outs", "the engine stopped making progress and a watchdog ended it")
    ENGINE_RPC_TIMEOUT = ("engine_rpc_timeout", "engine time-outs", "an RPC of vLLM's executor timed out")
    START_TIMEOUT = ("start_timeout", "engine time-outs", "the engine was still starting when its start deadline passed")
    SEGFAULT_NATIVE = ("segfault_native", "processes", "SIGSEGV in native code as the first fault")
    SIGILL_CPU = ("sigill_cpu", "processes", "an instruction that this CPU does not have")
    EXTERNAL_SIGTERM = ("external_sigterm", "processes", "a stop signal that our supervisor did not send")
    CLIENT_DISCONNECT_CRASH = ("client_disconnect_crash", "processes", "a leaving client took the whole server down")
    GPU_OFF_BUS = ("gpu_off_bus", "hardware", "the card fell off the bus: Xid 79 or its un-numbered forms")
    GPU_MCU_HALT = ("gpu_mcu_halt", "hardware", "the card's micro-controller halted: Xid 62")
    GSP_TIMEOUT = ("gsp_timeout", "hardware", "the card's system processor does not answer: Xid 119 or 120")
    ECC_UNCORRECTABLE = ("ecc_uncorrectable", "hardware", "uncorrectable memory error: Xid 48, 64, 94, 95, 171")
    NVLINK_ERROR = ("nvlink_error", "hardware", "NVLink failed: Xid 74, 144-150")
    PCIE_ERROR = ("pcie_error", "hardware", "PCIe errors on the card's link")
    IOMMU_FAULT = ("iommu_fault", "hardware", "the IOMMU refused an access of the card before any Xid")
    GPU_NEEDS_RESET = ("gpu_needs_reset", "hardware", "the card asks for a reset and shows no better cause")
    GPU_UNKILLABLE_PROCESS = ("gpu_unkillable_process", "hardware", "a task stuck in the driver survives SIGKILL")
    HOST_POWER_RESET = ("host_power_reset", "hardware", "the host went away without a shutdown record or an Xid")
    DRIVER_LIB_MISMATCH = ("driver_lib_mismatch", "driver", "NVIDIA's libraries and its kernel module differ in version")
    DRIVER_TOO_OLD = ("driver_too_old", "driver", "the driver is too old for this CUDA")
    DRIVER_NOT_READY = ("driver_not_ready", "driver", "no device yet, uvm broken, or the fabric manager missing")
    CONTAINER_LOST_GPU = ("container_lost_gpu", "driver", "NVML fails inside the container and works outside")
    PORT_IN_USE = ("port_in_use", "configuration", "the address is already in use")
    MODEL_MISSING = ("model_missing", "configuration", "the model path does not exist")
    MODEL_CORRUPT = ("model_corrupt", "configuration", "a model file has a wrong header or size")
    HF_DOWNLOAD = ("hf_download", "configuration", "the hub refused the download or cannot be reached")
    TEMPLATE_ERROR = ("template_error", "configuration", "the chat template does not compile")
    UNSUPPORTED_ARCH = ("unsupported_arch", "configuration", "the quantisation or dtype does not exist on this card")
    DISK_FULL = ("disk_full", "configuration", "no space left on a disk (not /dev/shm)")
    FD_EXHAUSTED = ("fd_exhausted", "configuration", "too many open files")
    ENGINE_CONFIG = ("engine_config", "configuration", "the engine cannot be started as it is configured")
    BAD_NUMBERS = ("bad_numbers", "configuration", "the model computes NaN or infinity")
    SD_WATCHDOG = ("sd_watchdog", "service manager", "systemd's watchdog fired and nothing deeper did")
    SD_START_LIMIT = ("sd_start_limit", "service manager", "systemd gave up restarting; the root is the first failed start")
    SD_STOP_TIMEOUT = ("sd_stop_timeout", "service manager", "a stop took too long and was escalated to SIGKILL")
    SUPERVISOR_DIED = ("supervisor_died", "service manager", "applianced ended without being told to, and the engine with it")
    OK_NORMAL = ("ok_normal", "no crash", "healthy")
    OK_SHUTDOWN = ("ok_shutdown", "no crash", "a requested stop")
    OK_CLIENT_DISCONNECT = ("ok_client_disconnect", "no crash", "a client left")
    OK_CLIENT_ERROR = ("ok_client_error", "no crash", "a client sent something wrong")
    OK_BENIGN_WARNING = ("ok_benign_warning", "no crash", "frightening but harmless")
    OK_DEGRADED = ("ok_degraded", "no crash", "works, needs maintenance")
    UNKNOWN = ("unknown", "unknown", "the evidence does not carry any cause; it is kept")
    # fmt: on


_BY_LABEL = {cause.label: cause for cause in Cause}
