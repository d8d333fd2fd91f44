"""What is left of a process that was killed while it wrote a folder."""

import multiprocessing
import os
import signal

from hf_freeze.io import whole_folder


def _write_and_die(folder):
    with whole_folder(folder) as written:
        (written / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_call_removes_what_a_killed_process_left(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(tmp_path / "out",))
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    assert [path.name for path in left.rglob("*")] == ["written", "half"]
    with whole_folder(tmp_path / "out") as written:
        (written / "whole").touch()
        with whole_folder(tmp_path / "other"):  # the folder of a process that runs stays
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]
    assert (tmp_path / "out" / "whole").exists()
