"""For every test: one thread (two beside another job made a step 20 times slower), no progress bars, a fixed global seed."""

import atexit
import gc
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; children inherit it
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="hf_freeze-tests-")  # text and tokens are cached there
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' bars too

import pytest
import torch

torch.set_num_threads(1)

# For a kind of device that is absent, torch keeps each seed all the same, with the stack of who set it: a millisecond a test.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None


@atexit.register
def _remove_cache(cache=os.environ["HF_DATASETS_CACHE"], owner=os.getpid()):  # noqa: B008  # not a forked child
    if os.getpid() == owner:
        shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def _same_random_state():
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What is imported by now stays. Trainer collects garbage at every end of training: .5 s among a million objects."""
    gc.collect()
    gc.freeze()
