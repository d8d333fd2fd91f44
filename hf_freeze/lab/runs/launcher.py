"""The processes of a launcher (torchrun, accelerate launch), which work on one run together."""

import gc
import os


def is_launched() -> bool:
    """Whether this is one of several processes that torchrun or accelerate started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process is the one that writes files."""
    return os.environ.get("RANK", "0") == "0"


def leave_processes() -> None:
    """Leave the group that `is_launched` speaks of, as the last act of a program.

    What still wraps a model for the group goes first: were it the last to hold the group, it would wait for the group's threads
    with Python locked, and for ever where one of them has a tensor to free (https://github.com/pytorch/pytorch/issues/56297).
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
