"""Size of checkpoints with seeded frozen parts, and the time to save and load them.

    python benchmarks/checkpoint_size.py                # Transformer-big, 36,000 types: needs 6 GiB of memory
    python benchmarks/checkpoint_size.py --preset tiny

Claim: the weights file contains only the stored parameters and persistent buffers, and a header of at most 64 KB. For
Transformer-big with only attention trained (row 4 of the freeze ablation) this is 302 MB; the full model (row 0) has 853 MB.
Sizes are exact.

Time: `save_pretrained`, and `from_pretrained` by the Auto class, of `--row` and of row 0, in alternating turns in one process.
The files stay in the page cache (no fsync), so disk time is excluded. A ratio is the median of the ratios of the rounds, with
quartiles. "Making again" regenerates all seeded tensors of the row. "Cold" loads from the disk, after the files were dropped
from the page cache. "Fetched" adds the download of the folder at 100 Mbit/s to loading from the page cache.

Limit: the bytes of the tensors at the rate at which one plain file of that size is written or read, plus the checks of the
seeded tensors. Saving verifies their digests: SHA-256 of their bytes, at the rate of one large buffer. Loading regenerates them,
at the rate of one large Philox tensor, and verifies them too.
"""

import hashlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _shared
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from hf_freeze import make_variant, stored_bytes
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.seeded import tensor as rng

BYTES_PER_SECOND = 100e6 / 8  # of a download


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of `tensors`, `header` (safetensors: its length in 8 bytes, then JSON) and `other` files."""
    weights = sorted(folder.glob("*.safetensors"))
    header = 0
    for file in weights:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            json.loads(stream.read(length))
            header += 8 + length
    size = {file: file.stat().st_size for file in folder.iterdir()}
    whole = sum(size[file] for file in weights)
    return {"tensors": whole - header, "header": header, "other": sum(size.values()) - whole}


def file_rates(folder: Path, size: int) -> tuple[float, float]:
    """Bytes per second of overwriting an existing file and of reading it back, through the page cache."""
    file, content = folder / "plain", bytearray(size)
    file.write_bytes(content)
    written = _shared.best(lambda: file.write_bytes(content))
    with file.open("rb", buffering=0) as stream:
        read = _shared.best(lambda: (stream.seek(0), stream.readinto(content)))
    file.unlink()
    return size / written, size / read


def forget(folder: Path) -> None:
    """Drop the files from the page cache, if the system supports it."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_load(folder: Path, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        forget(folder)
        times.append(_shared.seconds(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder)))
    return statistics.median(times)


def main() -> None:
    parser = _shared.parser(__doc__)
    parser.set_defaults(preset="big")
    parser.add_argument("--row", default="4")
    parser.add_argument("--vocab", type=int, help="default: the preset's")
    parser.add_argument("--rounds", type=int, default=5, help="of four turns each")
    parser.add_argument("--folder", help="where the files go, in a new folder that is removed; default: the system's")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    runs = _shared.rows(options)
    vocabulary = options.vocab or runs["0"].tokenizer.vocab_size

    def make(row: str) -> Any:
        methods = [method_from_dict(method) for method in runs[row].methods]
        return make_variant(
            _shared.config_of(runs[row], vocabulary),
            methods,
            task="seq2seq-lm",
            init="marian",
        )

    variant, dense = make(options.row), make("0")
    seeded = variant.seeded_tensors.values()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        folders = {"variant": Path(root, "variant"), "dense": Path(root, "dense")}
        saved = _shared.in_turns(
            lambda: variant.save_pretrained(folders["variant"]),
            lambda: dense.save_pretrained(folders["dense"]),
            options.rounds,
        )
        loaded = _shared.in_turns(
            lambda: AutoModelForSeq2SeqLM.from_pretrained(folders["variant"]),
            lambda: AutoModelForSeq2SeqLM.from_pretrained(folders["dense"]),
            options.rounds,
        )
        cold = {name: cold_load(folder, options.rounds) for name, folder in folders.items()}
        sizes = {name: file_sizes(folder) for name, folder in folders.items()}
        expected = {"variant": stored_bytes(variant), "dense": stored_bytes(dense)}
        write_rate, read_rate = file_rates(Path(root), sizes["variant"]["tensors"])
    tensors = [definition.generate("cpu") for definition in seeded]
    values = sum(tensor.numel() for tensor in tensors)
    drawn = sum(tensor.numel() for tensor in tensors if tensor.ndim == 2)  # zero biases cost nothing
    del tensors
    again = _shared.best(lambda: [definition.generate("cpu") for definition in seeded], options.rounds)
    large = torch.empty(1 << 24)
    philox = large.numel() / _shared.best(lambda: rng.uniform(0, "x", (4096, 4096), 0.1))
    sha = 4 * large.numel() / _shared.best(lambda: hashlib.sha256(large.numpy()).digest())
    check = 4 * values / sha
    limits = {
        "variant": (sizes["variant"]["tensors"] / write_rate + check,
                    sizes["variant"]["tensors"] / read_rate + drawn / philox + check),
        "dense": (sizes["dense"]["tensors"] / write_rate, sizes["dense"]["tensors"] / read_rate),
    }  # fmt: skip
    times = {"variant": (saved.one, loaded.one), "dense": (saved.other, loaded.other)}
    lines = []
    for name, row in (("variant", options.row), ("dense", "0")):
        (save, load), size = (statistics.median(rounds) for rounds in times[name]), sizes[name]
        lines.append([runs[row].label, f"{size['tensors']:,}", f"{size['tensors'] - expected[name]:,}",
                      f"{size['header']:,}", f"{size['other']:,}", f"{save:.2f}", f"{limits[name][0]:.2f}", f"{load:.2f}",
                      f"{limits[name][1]:.2f}", f"{cold[name]:.2f}",
                      f"{sum(size.values()) / BYTES_PER_SECOND + load:.2f}"])  # fmt: skip
    header = ["row", "bytes of tensors", "above what must be stored", "bytes of header", "of other files", "save, s", "limit",
              "load, s", "limit", "load cold, s", "fetched and loaded, s"]  # fmt: skip
    stored = {name: size["tensors"] for name, size in sizes.items()}
    summary = (
        f"tensors: {stored['variant'] / 1e6:.1f} MB instead of {stored['dense'] / 1e6:.1f} MB, ratio "
        f"{stored['variant'] / stored['dense']:.4f}; header at most {max(s['header'] for s in sizes.values()):,} bytes (claim: "
        f"65,536); save ratio {saved}, load ratio {loaded}; making {drawn / 1e6:.1f} million values again: {again:.2f} s, "
        f"{drawn / philox:.2f} s at the rate of one large tensor, {philox / 1e6:.0f} million a second, and SHA-256 at "
        f"{sha / 1e9:.2f}, writing at {write_rate / 1e9:.2f} and reading at {read_rate / 1e9:.2f} billion bytes a second; "
        f"{options.preset}, {vocabulary} types"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
