"""applianced on a made-up machine: BOX names the folder of its /sys, /proc and /dev, and of the file that names its boot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from appliance.gpu import kernel_log
from appliance.gpu.cards import Roots
from appliance.supervisor.__main__ import main

if __name__ == "__main__":
    box = Path(os.environ["BOX"])
    kernel_log.BOOT_ID = box / "boot_id"
    sys.exit(main(roots=Roots(box / "sys", box / "proc", box / "dev")))
