"""How far a compression is, for people, a page and a callback."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_PAUSE = 10.0  # seconds between two pages, at least
_SHARE = 0.01  # of the time that may go into pages


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a callback gets, before each measurement and while a model heals.

    `phase`: "measuring", "cut", "heal" or "engine". `text`: what is done now. `share`: of the steps that are planned so far.
    `seconds_left`: of these, by the mean of those that are done; None before the first is done.
    """

    phase: str
    text: str
    share: float
    seconds_left: float | None


# Called with each step. Where it returns True, the compression stops with `Stopped`; its exceptions stop it as well.
Callback = Callable[[Step], Any]


class Stopped(Exception):
    """A callback has stopped the compression. Called again with the same arguments, it goes on where it was."""


class Progress:
    """`say` gets a line for each step. `write` is called after steps, for the page: at most once in `_PAUSE` seconds, and for
    `_SHARE` of the time."""

    def __init__(self, say: Callable[[str], Any], callback: Callback | None, write: Callable[[], Any]) -> None:
        self._say, self._callback, self._write = say, callback, write
        self._planned, self._done, self._spent, self._next_page = 0, 0, 0.0, 0.0
        self._began: float | None = None  # the measurement that runs
        self.last = Step(phase="", text="starting", share=0.0, seconds_left=None)

    def plan(self, steps: int) -> None:
        """Know of further measurements of whole models."""
        self._end()
        self._planned += steps

    def step(self, text: str) -> None:
        """A measurement begins."""
        self._end()
        left = self._spent / self._done * max(self._planned - self._done, 0) if self._done else None
        self._began = time.monotonic()
        told = "" if left is None else f" (about {duration(left)} of measuring left)"
        self._say(f"measuring: {text}{told}")
        share = self._done / max(self._planned, self._done, 1)
        self._tell(Step(phase="measuring", text=text, share=share, seconds_left=left))

    def _end(self) -> None:
        if self._began is not None:
            self._spent, self._done, self._began = self._spent + time.monotonic() - self._began, self._done + 1, None

    def tell(self, phase: str, text: str) -> None:
        self._end()
        self._say(text)
        self._tell(Step(phase=phase, text=text, share=self.last.share, seconds_left=self.last.seconds_left))

    def heard(self, message: Mapping[str, Any]) -> None:
        """What healing says."""
        if "step" in message:
            text = f"healing: step {message['step']} of {message['steps']}"
            share = message["step"] / max(message["steps"], 1)
            self._tell(Step(phase="heal", text=text, share=share, seconds_left=message.get("seconds_left")))

    def _tell(self, step: Step) -> None:
        self.last = step
        if (began := time.monotonic()) >= self._next_page:
            self._write()
            ended = time.monotonic()
            self._next_page = ended + max(_PAUSE, (ended - began) / _SHARE)
        if self._callback is not None and self._callback(step) is True:
            raise Stopped(f"the callback stopped it at “{step.text}”; the same call goes on from there")


def duration(seconds: float) -> str:
    """Such as "50 s", "4 minutes"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
