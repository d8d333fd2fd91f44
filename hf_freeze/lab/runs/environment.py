"""Where a number comes from: code, versions, machine, memory."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_freeze._version import __version__


def environment() -> dict[str, Any]:
    """Versions, commit (None outside a checkout of hf_freeze, marked -dirty with changes) and device."""
    return {
        "hf_freeze": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def peak_memory() -> int:
    """Bytes: of the GPU's allocator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _commit() -> str | None:
    here = Path(__file__)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=False)

    try:
        # Installed into a virtual environment, this file lies inside somebody else's repository, which does not track it.
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return None
        return git("describe", "--always", "--dirty", "--exclude=*").stdout.strip() or None
    except OSError:  # no git
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
