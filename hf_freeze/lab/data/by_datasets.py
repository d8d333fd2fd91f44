"""Reads CSV, Parquet and Arrow files, plain or compressed, by `datasets`."""

import contextlib
import glob
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from hf_freeze.data.files import damaged, opened, packing_of
from hf_freeze.lab.data.cache import cache_root


@contextlib.contextmanager
def by_datasets(path: str | Path, kind: str, **options: Any) -> Iterator[Any]:
    """The rows of a file as an iterable data set, which is read piece by piece and leaves nothing in the cache.

    `kind`: csv, parquet or arrow. Raises FileNotFoundError, and ValueError for a damaged file.
    """
    is_packed = packing_of(path) is not None
    logger = logging.getLogger(f"datasets.packaged_modules.{kind}.{kind}")
    try:
        logger.disabled = True  # it would print what is raised
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix="locks-") as folder:
            plain = Path(path).absolute()
            if is_packed:
                plain = Path(folder) / "unpacked"
                with opened(path) as file, plain.open("wb") as copy:
                    shutil.copyfileobj(file, copy)
            files = [glob.escape(str(plain))]
            yield datasets.load_dataset(
                kind, data_files=files, split="train", streaming=True, cache_dir=folder, **options
            )
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, kind.title(), error) from error
    finally:
        logger.disabled = False
