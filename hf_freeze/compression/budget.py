"""What the compressed model may cost."""

import copy
import math
import re
from dataclasses import dataclass
from typing import Any

TIME_RESERVE = 0.05  # share of a limit of time that is left free when a shape is chosen: times of one folder drift
_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = r"\d+(?:\.\d+)?|\.\d+"


@dataclass(frozen=True, init=False)
class Budget:
    """Limits on the folder that is served.

    `max_bytes`: of all its files, tokenizer included, as a number or such as "2MB" (1 MB is 10**6 bytes). `max_ms`: for one text
    alone on one thread.

    Both may be shares, such as "30%": bytes of the model's own files, time of what the whole model takes in the same engine.
    Their limits are None until `resolved`, and `bytes_share` and `ms_share` hold the shares. Times are then those of the model,
    times the ratio to it in the same measurement.

    `max_loss`: points that the score may fall where there are labels, or fidelity, in %, on the inputs that shapes are chosen by.

    Raises ValueError for a limit that is not above 0, a share of 100 % or more, text that is no number, and where nothing is
    limited.
    """

    max_bytes: int | None
    max_ms: float | None
    max_loss: float | None
    bytes_share: float | None
    ms_share: float | None

    def __init__(
        self, *, max_bytes: int | str | None = None, max_ms: float | str | None = None, max_loss: float | None = None
    ) -> None:
        size, bytes_share = _limit("max_bytes", max_bytes, read_bytes)
        ms, ms_share = _limit("max_ms", max_ms, _read_ms)
        if max_loss is not None and not max_loss > 0:
            raise ValueError(f"max_loss={max_loss!r}: must be above 0, in points of the score, or of fidelity in %")
        if max_bytes is None and max_ms is None and max_loss is None:
            raise ValueError("a budget limits bytes, time or loss: give max_bytes, max_ms or max_loss")
        self._set(max_bytes=size, max_ms=ms, max_loss=max_loss, bytes_share=bytes_share, ms_share=ms_share)

    def _set(self, **values: Any) -> "Budget":
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def limits_bytes(self) -> bool:
        return self.max_bytes is not None or self.bytes_share is not None

    @property
    def limits_time(self) -> bool:
        return self.max_ms is not None or self.ms_share is not None

    def resolved(self, size: int, ms: float | None) -> "Budget":
        """With the limits that its shares come to for a model of `size` bytes and `ms` a text."""
        limits: dict[str, Any] = {}
        if self.bytes_share is not None:
            limits["max_bytes"] = int(self.bytes_share * size)
        if self.ms_share is not None and ms is not None:
            limits["max_ms"] = self.ms_share * ms
        return copy.copy(self)._set(**limits)

    @property
    def for_estimates(self) -> tuple[float, float | None]:
        """(bytes, infinite where they are not limited, and milliseconds, less a reserve for what an estimate is off)"""
        size = math.inf if self.max_bytes is None else float(self.max_bytes)
        return size, self.max_ms and self.max_ms * (1 - TIME_RESERVE)

    def to_dict(self) -> dict[str, Any]:
        """The limits as they were given, for JSON."""
        size, ms = (
            limit if share is None else f"{100 * share:.10g}%"
            for limit, share in ((self.max_bytes, self.bytes_share), (self.max_ms, self.ms_share))
        )
        return {"max_bytes": size, "max_ms": ms, "max_loss": self.max_loss}

    def excess(self, size: float, ms: float | None) -> list[str]:
        """What is above its limit, in words."""
        found = []
        if self.max_bytes is not None and size > self.max_bytes:
            found.append(f"{in_bytes(size)} of {self.limit('bytes')}")
        if self.max_ms is not None and ms is not None and ms > self.max_ms:
            found.append(f"{ms:.2f} ms of {self.limit('ms')}")
        return found

    def words(self) -> str:
        """The limits, such as "at most 2.00 MB, a loss of at most 1 point"."""
        limits = [f"at most {self.limit('bytes')}"] if self.limits_bytes else []
        limits += [f"at most {self.limit('ms')} a text"] if self.limits_time else []
        if self.max_loss is not None:
            limits.append(f"a loss of at most {self.max_loss:g} point{'s' * (self.max_loss != 1)}")
        return ", ".join(limits)

    def limit(self, cost: str) -> str:
        """That of "bytes" or "ms", such as "2.00 MB", "0.5 ms", or "1.25 MB (33 % of the model's)"."""
        value, share = (self.max_bytes, self.bytes_share) if cost == "bytes" else (self.max_ms, self.ms_share)
        if value is None:
            return f"{_percent(share or 0.0)} of the model's {'bytes' if cost == 'bytes' else 'time'}"
        if share is None:
            return in_bytes(value) if cost == "bytes" else f"{value:g} ms"
        return f"{in_bytes(value) if cost == 'bytes' else f'{value:.2f} ms'} ({_percent(share)} of the model's)"


def _limit(name: str, value: Any, read: Any) -> tuple[Any, float | None]:
    """(number, share of the model's), of which one is None at least."""
    if isinstance(value, str) and (match := re.fullmatch(rf"\s*(-?(?:{_NUMBER}))\s*%\s*", value)):
        share = float(match[1]) / 100
        if not 0 < share < 1:
            raise ValueError(
                f"{name}={value!r}: a share of what the model takes is above 0 % and below 100 %, such as 33%"
            )
        return None, share
    number = read(value) if isinstance(value, str) else value
    if number is not None and not number > 0:
        raise ValueError(f"{name}={number!r}: must be above 0")
    return number, None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _read_ms(text: str) -> float:
    match = re.fullmatch(rf"\s*(-?(?:{_NUMBER}))\s*(?:ms)?\s*", text)
    if match is None:
        raise ValueError(
            f"max_ms={text!r} is no number of milliseconds; write it as 5 or 0.8, or as a share of the model's, such as 50%"
        )
    return float(match[1])


def read_bytes(text: str) -> int:
    """A number of bytes, such as "2MB", "500 kB" or "1.5 MiB". Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{text!r} is no number of bytes; write it as 2MB, 500kB or 1.5MiB, or as a share of the model's, such as 33%"
        )
    if not match[2] and 0 < float(match[1]) < 1000:
        raise ValueError(
            f"max_bytes={text!r}: without a unit these are bytes, which hold no model; write {match[1]}MB, {match[1]}kB or "
            f"{match[1]}%"
        )
    return round(float(match[1]) * _UNITS[match[2]])


def in_bytes(size: float) -> str:
    """For people: "1.90 MB", "312 kB"."""
    return f"{size / 1e6:,.2f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def in_bytes_up(size: float) -> str:
    """The least number of bytes that `in_bytes` can tell, not below `size`."""
    step = 1e4 if size >= 1e6 else 1e2
    return in_bytes(step * math.ceil(size / step))
