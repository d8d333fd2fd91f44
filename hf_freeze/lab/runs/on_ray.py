"""The runs of a grid as tasks of Ray (https://docs.ray.io), on one machine or many.

Nothing is sent to the nodes but a run's settings: hf_freeze is installed on all of them, and the folder of the grid, like the
data, is on storage that all of them see under one path. There a run leaves its checkpoints, from which it goes on elsewhere
where its node is lost.
"""

import contextlib
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_freeze.install import how_to_install
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.processes import KEEP_MEMORY, WorkOptions, work

# Unless told otherwise, Ray tells its makers of every start, warns of what is to come, waits minutes for what is no Ray, and
# gives way to whatever else a machine does (niceness 15): on two busy cores, runs did not start for minutes.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_py_gcs_connect_timeout_s": "10",
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_worker_niceness": "0",
}

_PATIENCE = 60  # seconds without a node that has room for a run, after which the grid ends
_SHARED = 30  # seconds within which a file on shared storage is seen on all nodes


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """`address`: host:port of the Ray to use, which has a node on this machine; "auto" finds the one that runs here; None is
    RAY_ADDRESS or, without, a Ray of this machine's own that ends with the grid. `cpus`, `gpus`: what a run takes; a share of
    a GPU is one that runs have in common; None is one where any node has one, else none. `retries`: how often a run goes on
    after its node was lost or its process killed.

    Raises ValueError for values that no run can have.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        if self.address is not None and self.address not in ("auto", "local"):
            host, _, port = self.address.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise ValueError(
                    f"--address {self.address!r}: write HOST:PORT, such as 10.0.0.1:6379, or auto, or local"
                )
        if not self.cpus > 0:
            raise ValueError(f"--cpus {self.cpus}: a run takes more than 0 of them")
        if self.gpus is not None and not 0 <= self.gpus <= 1:
            raise ValueError(f"--gpus {self.gpus}: a run is one process on 0 to 1 GPUs")
        if self.retries < 0:
            raise ValueError(f"--retries {self.retries}: must be 0 or more")


@dataclass
class _Task:
    run: Run
    folder: Path
    until: float | None
    attempt: int = 0


class RayTasks:
    """Runs as many at a time as Ray has room for. `say` receives what is worth a line. `jobs`: have no more than so many at
    a time, and none that Ray would let wait; if not given, Ray has all runs, and some wait there. `begin_again`: see
    `WorkOptions`; retries always do.

    Raises ValueError where Ray is not installed or no node has what a run takes, ConnectionError where no Ray answers.
    """

    def __init__(
        self,
        options: RayOptions,
        resume_anyway: bool,
        say: Callable[[str], Any],
        *,
        jobs: float | None = None,
        begin_again: bool = False,
    ) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            import ray
            from ray.util.queue import Queue
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise ValueError(f"--on ray needs the package ray ({error}); {how_to_install('ray')}") from error
        self._ray, self._options, self._say = ray, options, say
        self._jobs, self._resume_anyway, self._begin_again = jobs, resume_anyway, begin_again
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(ray, options.address)
        try:
            gpus = options.gpus
            if gpus is None:
                gpus = 1 if any(node.get("GPU", 0) >= 1 for node in self._nodes()) else 0
            self._takes = {"CPU": options.cpus, "GPU": gpus}
            if not self._fits():
                raise ValueError(f"no node of Ray has {self._wanted()}; {self._largest()}")
            say(f"Ray: nodes {len(self._nodes())}; a run takes {self._wanted()}")
            # Runs send their progress here; on this node, so that no other takes it with it.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._messages = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        except BaseException:
            if self._connected:
                ray.shutdown()
            raise
        self._threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, int(options.cpus)))
        # One process a run, as in a local grid: its peak memory is its own. Retries are ours, so that they are said and bounded.
        self._remote: Any = ray.remote(
            num_cpus=options.cpus,
            num_gpus=gpus,
            max_calls=1,
            max_retries=0,
            runtime_env={"env_vars": KEEP_MEMORY},
        )(_work)
        self._running: dict[Any, _Task] = {}
        self._stuck_since: float | None = None

    def has_room(self) -> bool:
        return self._jobs is None or len(self._running) < min(self._jobs, self._room())

    def start(self, run: Run, folder: Path, until: float | None = None) -> None:
        """`until`: as `execute` takes it; a run that pauses there leaves a checkpoint and no figures."""
        (folder / "error.log").unlink(missing_ok=True)
        self._submit(_Task(run, folder, until))

    def message(self) -> tuple[Path, dict[str, Any]] | None:
        """The next word of a run, by its folder; None where none came within half a second."""
        try:
            return self._messages.get(timeout=0.5)
        except queue.Empty:
            return None
        except self._ray.exceptions.RayError as error:
            raise ConnectionError(f"Ray is lost ({_in_short(error)}): the same command resumes") from error

    def ended(self) -> list[tuple[Path, str]]:
        """The folders of the runs that ended since the last call, each with what to say where it left no figures and no error.

        Raises ConnectionError where for a minute no node was left that has what a run takes.
        """
        if not self._running:
            return []
        self._check_not_stuck()
        ended = []
        for reference in self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)[0]:
            task, reason = self._running.pop(reference), ""
            try:
                left = task.folder / self._ray.get(reference)
                if not _is_seen(left):
                    reason = f"it ended on another node, but {left} is not here"
            except self._ray.exceptions.RayTaskError as error:
                reason = str(error).strip().splitlines()[-1]
            except self._ray.exceptions.RayError as error:
                if task.attempt < self._options.retries:
                    task.attempt += 1
                    again = f"again, {task.attempt} of {self._options.retries}"
                    self._say(f"{task.folder.name}: {_in_short(error)}; {again}")
                    self._submit(task)
                    continue
                reason = f"{_in_short(error)}; tried {task.attempt + 1} times"
            ended.append((task.folder, reason))
        return ended

    def close(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._messages.shutdown(force=True)
        if self._connected:
            self._ray.shutdown()

    def _submit(self, task: _Task) -> None:
        where = (str(Path.cwd()), str(task.folder))
        begin_again = self._begin_again or task.attempt > 0
        options = WorkOptions(
            threads=self._threads, resume_anyway=self._resume_anyway, begin_again=begin_again, until=task.until
        )
        name = f"hf-freeze {task.run.name} {task.folder.name}"
        remote = self._remote.options(name=name)
        self._running[remote.remote(task.run, *where, self._takes["GPU"], options, self._messages)] = task

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _fits(self) -> bool:
        """Whether any node has what a run takes, busy or not."""
        return any(all(node.get(name, 0) >= wanted for name, wanted in self._takes.items()) for node in self._nodes())

    def _room(self) -> int:
        """How many runs the nodes hold at a time, if nothing else is on them; at least 1."""
        wanted = {name: number for name, number in self._takes.items() if number}
        room = (min(node.get(name, 0) / number for name, number in wanted.items()) for node in self._nodes())
        return max(1, sum(int(runs + 1e-9) for runs in room))

    def _wanted(self) -> str:
        return _in_words(self._takes)

    def _largest(self) -> str:
        nodes = self._nodes()
        most = {name: max(node.get(name, 0) for node in nodes) for name in self._takes}
        return f"the most that any of {len(nodes)} has: {_in_words(most)}"

    def _check_not_stuck(self) -> None:
        if self._fits():
            self._stuck_since = None
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if time.monotonic() - self._stuck_since > _PATIENCE:
            raise ConnectionError(f"no node with {self._wanted()} is left, for {_PATIENCE} s: the same command resumes")


def _in_words(resources: dict[str, float]) -> str:
    return " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in resources.items())


def _connect(ray: Any, address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        ray.init(address=address, include_dashboard=False, **quiet)
        return
    try:
        if address != "auto":
            # Ray itself would try for two minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConnectionError(
            f"no Ray answers at {address!r} ({_in_short(error)}); start one with ray start --head, and its nodes with ray start "
            "--address HOST:PORT. If it was started with a token, set RAY_AUTH_MODE=token"
        ) from error


def _work(
    run: Run,
    cwd: str,
    name: str,
    gpus: float,
    options: WorkOptions,
    messages: Any,
) -> str:
    """One run, on a node of Ray, in a process of its own. `cwd`: where the command runs, from which paths of data begin.
    Returns the file of the run's folder that was written last: its figures, or the state in the checkpoint where it paused."""
    import ray
    from ray.exceptions import RayError

    from hf_freeze.training.resume import last_whole_checkpoint

    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # those there are other tasks'
    if Path(cwd).is_dir():
        os.chdir(cwd)
    folder, node = Path(cwd, name), ray.util.get_node_ip_address()
    if not _is_seen(folder / "run.json"):
        raise FileNotFoundError(f"{folder} is not there on node {node}: --out must be on storage that all nodes see")
    ours = _Attempt(folder, ray.get_runtime_context().get_node_id())

    def report(message: dict[str, Any]) -> None:
        ours.check()
        with contextlib.suppress(RayError):  # progress is no reason to stop
            messages.put((Path(name), message))

    report({"stage": f"starting on {node}"})
    work(run, folder, options, report)
    if (folder / "metrics.json").exists():
        return "metrics.json"
    checkpoint = last_whole_checkpoint(folder / "checkpoints")
    assert checkpoint is not None  # it has paused there
    return str(Path(checkpoint, "trainer_state.json").relative_to(folder))


class _Attempt:
    """A node that is cut off may live on: a run that another one goes on with ends itself, at the latest before its next
    checkpoint."""

    def __init__(self, folder: Path, node: str) -> None:
        self.path, self.name = folder / "checkpoints" / "attempt", f"{node} {uuid.uuid4().hex}"
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(self.name)

    def check(self) -> None:
        if self.path.read_text() != self.name:
            os._exit(1)


def _is_seen(path: Path) -> bool:
    """Whether a file that another node wrote is there. Shared storage may remember for a while that it was not; to list the
    folder asks again."""
    deadline = time.monotonic() + _SHARED
    while not path.exists():
        if not path.parent.is_dir() or time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.5)
    return True


def _in_short(error: BaseException) -> str:
    """The first sentence: Ray goes on about how to find out more."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
