"""What the compressed model may cost."""

import re
from dataclasses import dataclass, replace

TIME_RESERVE = 0.05  # share of a limit of time that is left free when a shape is chosen: times of one folder drift
_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, init=False)
class Budget:
    """Limits on the folder that is served.

    `max_bytes`: of all its files, tokenizer included, as a number or such as "2MB" (1 MB is 10**6 bytes). `max_ms`: for one text
    alone on one thread; texts that are generated have the mean length of the dev split's. `min_score`: on the dev split, in the
    engine.

    Raises ValueError for a limit that is not above 0, text that is no number of bytes, and where neither bytes nor time are
    limited.
    """

    max_bytes: int | None
    max_ms: float | None
    min_score: float | None

    def __init__(
        self, *, max_bytes: int | str | None = None, max_ms: float | None = None, min_score: float | None = None
    ) -> None:
        size = read_bytes(max_bytes) if isinstance(max_bytes, str) else max_bytes
        for name, value in (("max_bytes", size), ("max_ms", max_ms)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: must be above 0")
        if size is None and max_ms is None:
            raise ValueError("a budget limits bytes or time: give max_bytes, max_ms or both")
        for name, value in (("max_bytes", size), ("max_ms", max_ms), ("min_score", min_score)):
            object.__setattr__(self, name, value)

    def excess(self, size: float, ms: float | None) -> list[str]:
        """What is above its limit, in words."""
        found = []
        if self.max_bytes is not None and size > self.max_bytes:
            found.append(f"{in_bytes(size)} of {in_bytes(self.max_bytes)}")
        if self.max_ms is not None and ms is not None and ms > self.max_ms:
            found.append(f"{ms:.2f} ms of {self.max_ms:g} ms")
        return found

    def with_reserve(self) -> "Budget":
        """For choosing a shape: with less time."""
        return self if self.max_ms is None else replace(self, max_ms=self.max_ms * (1 - TIME_RESERVE))

    def words(self) -> str:
        """The limits, such as "at most 2.00 MB, a score of at least 30"."""
        limits = [f"at most {in_bytes(self.max_bytes)}"] if self.max_bytes is not None else []
        limits += [f"at most {self.max_ms:g} ms a text"] if self.max_ms is not None else []
        limits += [f"a score of at least {self.min_score:g}"] if self.min_score is not None else []
        return ", ".join(limits)


def read_bytes(text: str) -> int:
    """A number of bytes, such as "2MB", "500 kB" or "1.5 MiB". Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes; write it as 2MB, 500kB or 1.5MiB")
    return round(float(match[1]) * _UNITS[match[2]])


def in_bytes(size: float) -> str:
    """For people: "1.90 MB", "312 kB"."""
    return f"{size / 1e6:,.2f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
