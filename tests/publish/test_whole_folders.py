"""What is left of a process that was killed while it wrote a folder."""

import multiprocessing
import os
import signal

from hf_freeze.io import whole_folder, write_whole


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


def test_the_folder_of_a_process_in_another_container_stays(tmp_path, monkeypatch):
    def kill(pid, signal):  # its number means nothing here
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    with whole_folder(tmp_path / "out") as written:
        (written / "half").touch()
        with whole_folder(tmp_path / "other"):
            pass
        assert (written / "half").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_two_containers_with_the_same_process_number_write_one_file(tmp_path, monkeypatch):
    parts = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: parts.extend(path.name for path in tmp_path.glob("*.part")))
    for content in ("one", "two"):
        write_whole(tmp_path / "file", content)
    assert len(set(parts)) == 2
    assert (tmp_path / "file").read_text() == "two"
