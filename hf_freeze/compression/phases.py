"""What a compression has found out so far, so that a stopped one goes on."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_freeze.io import write_whole
from hf_freeze.run_folder import first_difference

FILE = "phases.json"
# These are compared by digests, which would tell the user nothing.
_BY_DIGEST = {"model": "another model", "inputs": "other inputs", "texts": "other texts", "labels": "other labels"}


class Phases:
    """Results by the name of their phase, in a file of `out` that is rewritten whole after each.

    `identity`: what must be the same for a compression to go on. Raises ValueError where `out` holds another one.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self._path, self._spent = out / FILE, 0.0
        identity = json.loads(json.dumps(identity))
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else json.dumps({"identity": identity})
            self._state: dict[str, Any] = {"results": {}, "seconds": {}} | json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path} is damaged ({error}); remove {out}, or choose another --out") from None
        there = self._state["identity"]
        if difference := first_difference(there, identity):
            others = [f"of {words}" for key, words in _BY_DIGEST.items() if there.get(key) != identity.get(key)]
            difference = " and ".join(others) or difference
            raise ValueError(f"{out} holds another compression ({difference}); choose another --out")
        for part in out.rglob("*.part"):  # of files that a killed process did not finish
            if part.is_file():  # folders are of `convert`, which resumes
                part.unlink()

    @property
    def begun(self) -> bool:
        """Whether an earlier call has finished phases."""
        return bool(self._state["results"])

    @property
    def seconds(self) -> float:
        """Of all phases that are done."""
        return sum(self._state["seconds"].values())

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        return dict(self._state["seconds"])

    def done(self, name: str) -> bool:
        return name in self._state["results"]

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a phase as plain data: computed at the first call, then read. The time of phases within it is theirs."""
        if not self.done(name):
            began, spent = time.monotonic(), self._spent
            result = compute()
            self._state["results"][name] = json.loads(json.dumps(result))
            own = time.monotonic() - began - (self._spent - spent)
            self._spent += own
            self._state["seconds"][name] = own
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._state, indent=1) + "\n")
        return self._state["results"][name]
