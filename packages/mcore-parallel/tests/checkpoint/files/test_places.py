"""Checkpoints behind URLs: in memory, and on a real S3 server that goes away in the middle."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore.parallel.checkpoint import (
    CheckpointingException,
    CheckpointManager,
    DamagedCheckpointError,
    ShardedObject,
    ShardedTensor,
    is_complete_checkpoint,
    keep_last,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    make_tp_sharded_tensor_for_checkpoint,
    remove_incomplete,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.__main__ import main
from mcore.parallel.checkpoint.files import places
from mcore.parallel.checkpoint.files.places import RemotePath, remote_path
from rank_testing import free_port, run_ranks

pytestmark = pytest.mark.xdist_group("s3")  # one server is enough

MOMENTS = ["payload", "manifest.json"]
SERVERS = """
import os, signal, sys
from moto.backends import get_backend
from moto.server import main
get_backend("s3")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for port in sys.stdin:
    number = os.fork()
    if number == 0:
        main(["-H", "127.0.0.1", "-p", port.strip()])
    print(number, flush=True)
"""
PROXY = """
import socket, sys, threading
def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    sink.close()
own, other = map(int, sys.argv[1:])
with socket.create_server(("127.0.0.1", own)) as listening:
    while True:
        client, _ = listening.accept()
        server = socket.create_connection(("127.0.0.1", other))
        for pair in ((client, server), (server, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def wait_for(port: int, is_alive: Callable[[], bool]) -> None:
    """Wait until a program listens."""
    for _ in range(15_000):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert is_alive()
            time.sleep(0.02)
        else:
            return
    raise TimeoutError(f"nobody listens on port {port}")


def started(words: list[str], port: int) -> subprocess.Popen[bytes]:
    """Start a program and wait until it listens."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet)
    try:
        wait_for(port, lambda: process.poll() is None)
    except BaseException:
        ended(process)
        raise
    return process


def ended(process: subprocess.Popen[bytes]) -> None:
    """Kill a program as a crash would."""
    process.kill()
    process.wait()


class Server:
    """An S3 server with one empty bucket, which forgets all of it when it is killed.

    Each start is a fork of one program, which imports the server's modules once.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._program = subprocess.Popen(
            [sys.executable, "-c", SERVERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._start()

    def _start(self) -> None:
        import s3fs

        assert self._program.stdin
        assert self._program.stdout
        print(self.port, file=self._program.stdin, flush=True)
        self._number = int(self._program.stdout.readline())
        try:
            wait_for(self.port, self._is_alive)
            s3fs.S3FileSystem().mkdir("bucket")
        except BaseException:
            self.end()
            raise

    def _is_alive(self) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self._number, 0)
            return True
        return False

    def restart(self) -> None:
        """Kill it and start it."""
        self.kill()
        self._start()

    def kill(self) -> None:
        """Kill it as a crash would."""
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)
        while self._is_alive():
            time.sleep(0.005)

    def end(self) -> None:
        """Kill it for good."""
        self.kill()
        self._program.communicate()


def client_settings(port: int) -> dict[str, str]:
    """What a user sets for s3fs."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server, and the settings of its clients."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in client_settings(port).items():
            patch.setenv(name, value)
        server = Server(port)
        yield server
    server.end()


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty folder."""
    if request.param == "s3":
        request.getfixturevalue("server")
        return f"s3://bucket/{tmp_path.name}"
    return f"memory://{tmp_path.name}"


def state_of(step: int) -> dict[str, Any]:
    """Tensors, an object and values that say which step they are of."""
    return {
        "rows": torch.full((4, 3), float(step)),
        "large": torch.arange(700_000 if step == 11 else 10) + step,
        "object": ShardedObject("object", [step], (1,), (0,)),
        "step": step,
    }


def check_loads(path: Any, step: int) -> None:
    """Read a checkpoint back."""
    expected = state_of(step)
    blank = {**state_of(0), "large": torch.zeros_like(expected["large"])}
    loaded = load_sharded_state_dict(blank, path, unexpected="raise", verify="before")
    assert torch.equal(loaded["rows"], expected["rows"])
    assert torch.equal(loaded["large"], expected["large"])
    assert (loaded["object"], loaded["step"]) == ([step], step)


def names(paths: list[Any]) -> list[str]:
    return [path.name for path in paths]


def test_a_run_behind_a_url(root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "_PART_BYTES", 5 << 20)  # the least that S3 takes of many parts
    monkeypatch.setattr(places, "_RANGE_BYTES", 2 << 20)
    assert (list_checkpoints(root), latest_checkpoint(root), remove_incomplete(root)) == (
        [],
        None,
        [],
    )
    for step in (9, 10):
        save_sharded_state_dict(state_of(step), f"{root}/step_{step}/")
    handle = save_sharded_state_dict(state_of(11), f"{root}/step_11", async_=True)
    assert os.fspath(handle.result()) == f"{root}/step_11"
    assert names(list_checkpoints(root)) == ["step_9", "step_10", "step_11"]
    latest = latest_checkpoint(root)
    assert str(latest) == f"{root}/step_11"
    assert isinstance(latest, RemotePath)
    check_loads(latest, 11)
    with pytest.raises(CheckpointingException, match="already exists"):
        save_sharded_state_dict(state_of(1), latest)
    assert names(keep_last(root, 1, protect=["step_9"])) == ["step_10"]
    assert names(list_checkpoints(root)) == ["step_9", "step_11"]
    assert names(remote_path(root).folders()) == ["step_11", "step_9"]
    assert main(["ls", root]) == main(["verify", root]) == main(["show", f"{root}/step_9"]) == 0
    assert main(["diff", f"{root}/step_9", f"{root}/step_11"]) == 1
    assert main(["to-torch", f"{root}/step_9", str(tmp_path / "file.pt")]) == 0
    assert torch.load(tmp_path / "file.pt")["step"] == 9
    payload = next(name for name in latest.sizes() if name.endswith(".distcp"))
    content = bytearray((latest / payload).read_range(0, latest.sizes()[payload]))
    content[len(content) // 2] ^= 1
    with (latest / payload).new_file() as stream:
        stream.write(bytes(content))
    assert main(["verify", root]) == 1
    with pytest.raises(CheckpointingException, match="the content of key 'large' has changed"):
        load_sharded_state_dict({"large": state_of(11)["large"]}, latest, unexpected="ignore")
    (latest / payload).remove()
    assert (is_complete_checkpoint(latest), latest_checkpoint(root)) == (
        False,
        remote_path(f"{root}/step_9"),
    )


def test_checkpoints_of_torch_and_copied_ones_are_read(root: str, tmp_path: Path) -> None:
    tensors = {"w": torch.arange(12.0).view(3, 4), "n": 5}
    dcp.save(tensors, checkpoint_id=tmp_path / "torch", no_dist=True)
    save_sharded_state_dict(tensors, tmp_path / "ours")
    for name in ("torch", "ours"):
        for file in (tmp_path / name).iterdir():
            with (remote_path(f"{root}/{name}") / file.name).new_file() as stream:
                stream.write(file.read_bytes())
        target = {"w": torch.zeros(3, 4), "n": 0}
        loaded = load_sharded_state_dict(target, f"{root}/{name}", unexpected="raise")
        assert torch.equal(target["w"], tensors["w"])
        assert loaded["n"] == 5
        assert main(["diff", f"{root}/{name}", f"{tmp_path / name}"]) == 0
    assert names(list_checkpoints(root, pattern="torch|ours")) == ["torch", "ours"]


def trained(weight: float) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """A model and its optimizer after one step."""
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, weight)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_manager_of_a_run_behind_a_url(root: str) -> None:
    manager = CheckpointManager(root, keep=2)
    assert manager.load_latest(*trained(0.0)) is None
    runs = {step: trained(float(step)) for step in (1, 2, 3)}
    for step, run in runs.items():
        assert manager.save(*run, step=step)
    assert names(list_checkpoints(root)) == ["step_2", "step_3"]

    folder = remote_path(root)
    [payload] = [name for name in (folder / "step_3").sizes() if name.endswith(".distcp")]
    content = bytearray((folder / "step_3" / payload).read_range(0, 1 << 20))
    content[len(content) // 2] ^= 1
    with (folder / "step_3" / payload).new_file() as stream:
        stream.write(content)
    manager = CheckpointManager(root, keep=2)
    model, optimizer = trained(9.0)
    found = manager.load_latest(model, optimizer, verify="before")
    assert found == {"step": 2}
    assert torch.equal(model.weight, runs[2][0].weight)
    assert manager.save(*runs[3], step=3)
    assert names(folder.folders()) == ["step_2", "step_3", "step_3.damaged"]
    assert CheckpointManager(root).load_latest(model, optimizer, verify="before") == {"step": 3}

    manager = CheckpointManager(root)
    assert manager.rollback(2, "spike") == folder / "spike"
    assert names((folder / "spike").folders()) == ["step_3"]
    assert names(folder.folders()) == ["spike", "step_2", "step_3.damaged"]
    assert manager.load_latest(model, optimizer) == {"step": 2}
    branch = CheckpointManager(folder / "spike")
    assert branch.load(model, optimizer, step=3, verify="before") == {"step": 3}


@pytest.mark.slow
def test_a_storage_that_is_away_is_not_a_damaged_checkpoint(server: Server) -> None:
    root = "s3://bucket/away"
    manager = CheckpointManager(root)
    for step in (1, 2):
        manager.save(*trained(1.0), step=step)
    reads = RemotePath.read_range

    def away(self: RemotePath, start: int, end: int) -> bytes:
        """Lose the server for good at the first byte of a payload."""
        if self.name.endswith(".distcp"):
            server.kill()
        return reads(self, start, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "read_range", away)
        try:
            with pytest.raises(CheckpointingException, match="Could not connect") as raised:
                manager.load_latest(*trained(0.0))
        finally:
            server.restart()
    assert not isinstance(raised.value, DamagedCheckpointError)


def test_files_without_a_manifest_are_no_checkpoint(root: str) -> None:
    """Whatever moment a save dies at, on whatever rank, what is left has no manifest."""
    path = remote_path(root) / "step_2"
    save_sharded_state_dict({"n": 1}, path.parent / "step_1")
    save_sharded_state_dict({"n": 2}, path)
    (path / "manifest.json").remove()
    left = path.sizes()
    assert len(left) == 2
    assert not is_complete_checkpoint(path)
    assert latest_checkpoint(root) == path.parent / "step_1"
    with pytest.raises(CheckpointingException, match=r"manifest\.json is missing"):
        load_sharded_state_dict({"n": 0}, path)
    save_sharded_state_dict({"n": 3}, path)
    assert len({*path.sizes()} - {*left}) == 2  # its own payload and a manifest; no leftover
    assert load_sharded_state_dict({"n": 0}, path) == {"n": 3}
    (path / "manifest.json").remove()
    assert remove_incomplete(root) == [path]
    assert names(path.parent.folders()) == ["step_1"]
    with (path / "notes.txt").new_file() as stream:
        stream.write(b"of somebody else")
    with pytest.raises(CheckpointingException, match="already exists"):
        save_sharded_state_dict({"n": 3}, path)
    assert (remove_incomplete(root), [*path.sizes()]) == ([], ["notes.txt"])
    assert [(path / "notes.txt").is_file(), path.is_file(), path.is_dir()] == [True, False, True]


@contextmanager
def failing_at(wanted: str, fail: Callable[[], None]) -> Iterator[None]:
    """Call a function right before a file of a kind is sent."""
    send = RemotePath.new_file

    @contextmanager
    def watched(path: RemotePath) -> Iterator[Any]:
        if ("payload" if path.name.startswith("__") else path.name) == wanted:
            with send(path) as stream:
                stream.write(b"the beginning")
                fail()
                yield stream
        else:
            with send(path) as stream:
                yield stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "new_file", watched)
        yield


def halves(step: int) -> dict[str, Any]:
    """A weight of which each of two ranks has its rows, and a number."""
    import torch.distributed as dist

    rows = torch.full((50_000, 2), float(step + dist.get_rank()))
    return {
        "w": make_tp_sharded_tensor_for_checkpoint(rows, "w", tp_group=dist.group.WORLD),
        "step": step,
    }


def check_both(path: Any, step: int) -> None:
    """Read what two ranks saved, whole."""
    whole = ShardedTensor.from_rank_offsets("w", torch.zeros(100_000, 2))
    loaded = load_sharded_state_dict({"w": whole, "step": 0}, path)
    assert loaded["step"] == step
    assert loaded["w"][::50_000, 0].tolist() == [step, step + 1]


def saves_through_outages(server: int, port: int, root: str) -> dict[str, list[Any]]:
    """Save while the way to the server is cut at each moment, and again once it is back."""
    import torch.distributed as dist

    os.environ.update(client_settings(port))
    rank, seen = dist.get_rank(), {}
    ways: list[subprocess.Popen[bytes]] = []

    def way(is_open: bool) -> None:
        if rank == 0:
            if is_open:
                ways.append(started(["-c", PROXY, str(port), str(server)], port))
            else:
                ended(ways.pop())

    way(True)
    dist.barrier()
    save_sharded_state_dict(halves(1), f"{root}/step_1")
    path = f"{root}/step_2"
    for moment, async_ in zip(MOMENTS, (True, False), strict=True):
        try:
            with failing_at(moment if rank == 0 else "none", lambda: way(False)):
                handle = save_sharded_state_dict(halves(2), path, async_=async_)
                if handle is not None:
                    handle.result()
            text = "no error"
        except CheckpointingException as error:
            text = str(error)
        with pytest.raises(
            OSError, match="Could not connect"
        ):  # which is not to say that there is none
            latest_checkpoint(root)
        dist.barrier()
        way(True)
        dist.barrier()
        left = sorted(remote_path(path).sizes())
        found = [latest_checkpoint(root).name, is_complete_checkpoint(path)]
        dist.barrier()
        save_sharded_state_dict(halves(2), path)
        seen[moment] = [text, *found, len(left), "manifest.json" in left]
        check_both(path, 2)
        assert len(remote_path(path).sizes()) == 4
        dist.barrier()
        if rank == 0:
            remote_path(path).remove_all()
        dist.barrier()
    way(False)
    return seen


@pytest.mark.slow
def test_an_outage_at_any_moment_is_an_error_and_the_next_save_works(server: Server) -> None:
    root = "s3://bucket/outages"
    first, second = run_ranks(
        saves_through_outages, 2, server.port, free_port(), root, timeout_s=300
    )
    assert first == second
    assert list(first) == MOMENTS
    for moment, (text, latest, is_complete, _, has_manifest) in first.items():
        name = moment if moment != "payload" else "__0_0-"
        assert f"cannot save {root}/step_2: rank 0: {root}/step_2/{name}" in text
        assert "Could not connect" in text
        assert (latest, is_complete, has_manifest) == ("step_1", False, False)
    assert first["manifest.json"][3] == 3  # two payloads and the index
    check_both(f"{root}/step_1", 1)


@pytest.mark.slow
def test_a_server_that_is_killed_and_starts_empty(server: Server) -> None:
    """What it had is lost, and no save takes a part of a checkpoint for one."""
    with (
        failing_at(".metadata", server.restart),
        pytest.raises(CheckpointingException, match=r"step_1/__0_0-\w+\.distcp cannot be read"),
    ):
        save_sharded_state_dict({"n": 1}, "s3://bucket/killed/step_1")
    assert list_checkpoints("s3://bucket/killed") == []
    save_sharded_state_dict({"n": 1}, "s3://bucket/killed/step_1")
    assert names(list_checkpoints("s3://bucket/killed")) == ["step_1"]


@contextmanager
def failing_at_call(number: int, *, has_arrived: bool = False) -> Iterator[list[str]]:
    """Lose one request to S3, or the answer to one that changes something there.

    A lost answer to any other request is no different from a lost request.

    Yields:
        The names of all requests that are counted.
    """
    from aiobotocore.client import AioBaseClient
    from botocore.exceptions import EndpointConnectionError

    call, made = AioBaseClient._make_api_call, []

    async def watched(self: Any, operation: str, parameters: Any) -> Any:
        if has_arrived and operation.startswith(("Get", "Head", "List")):
            return await call(self, operation, parameters)
        made.append(operation)
        is_lost = len(made) == number
        answer = await call(self, operation, parameters) if has_arrived or not is_lost else None
        if is_lost:
            raise EndpointConnectionError(endpoint_url="http://lost")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AioBaseClient, "_make_api_call", watched)
        yield made


@pytest.mark.parametrize("has_arrived", [False, True], ids=["request", "answer"])
def test_each_request_of_a_save_may_be_lost(server: Server, has_arrived: bool) -> None:
    root = f"s3://bucket/lost-{has_arrived}"
    state = {"w": torch.arange(3000.0), "step": 1}
    save_sharded_state_dict(state, f"{root}/step_1")
    before, saved, refused = written(f"{root}/step_1"), 0, 0
    for number in itertools.count(1):
        path = remote_path(f"{root}/lost/step_{number}")
        with failing_at_call(number, has_arrived=has_arrived) as made:
            try:
                save_sharded_state_dict({**state, "step": 2}, path)
                saved += 1
            except CheckpointingException:
                refused += 1
        assert written(f"{root}/step_1") == before
        if is_complete_checkpoint(path):
            check_whole(path, 2)
        else:
            assert len(made) >= number
            save_sharded_state_dict({**state, "step": 3}, path)  # whatever is left there
            check_whole(path, 3)
        if len(made) < number:
            break
    check_whole(f"{root}/step_1", 1)
    assert refused > (2 if has_arrived else 3)
    assert saved > 0


def test_each_request_of_a_load_may_be_lost(server: Server) -> None:
    """The load after it makes all requests up to the next one, so it is none the worse for it."""
    path = "s3://bucket/lost-reads/step_1"
    save_sharded_state_dict({"w": torch.arange(3000.0), "step": 1}, path)
    before, refused = written(path), 0
    for number in itertools.count(1):
        with failing_at_call(number) as made:
            try:
                check_whole(path, 1)
            except DamagedCheckpointError as error:
                raise AssertionError("a lost request is no damage") from error
            except CheckpointingException:
                refused += 1
        if len(made) < number:
            break
    assert refused > 3
    check_whole(path, 1)
    assert written(path) == before


def written(folder: str) -> dict[str, tuple[str, Any]]:
    """The digest of each file in a folder, and when it was written."""
    import s3fs

    found = s3fs.S3FileSystem().find(folder, detail=True, refresh=True)
    assert found
    return {name: (one["ETag"], one["LastModified"]) for name, one in found.items()}


def check_whole(path: Any, step: int) -> None:
    found = load_sharded_state_dict({"w": torch.zeros(3000), "step": 0}, path)
    assert torch.equal(found["w"], torch.arange(3000.0))
    assert found["step"] == step


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for url, words in {
        "gopher9://host/step_1": "Protocol not known: gopher9",
        "s3:/bucket/step_1": "lacks a slash",
    }.items():
        with pytest.raises(CheckpointingException, match=words):
            save_sharded_state_dict({"n": 1}, url)
    save_sharded_state_dict({"n": 1}, f"file://{tmp_path}/step_1")
    assert list_checkpoints(tmp_path) == [tmp_path / "step_1"]
    for module in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.setitem(sys.modules, module, None)
    for call in (list_checkpoints, is_complete_checkpoint, lambda url: keep_last(url, 1)):
        with pytest.raises(CheckpointingException, match=r"mcore-parallel\[remote\]"):
            call("memory://run/step_1")
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_load_that_reads_in_order_fetches_larger_and_larger_blocks(tmp_path: Path) -> None:
    file = remote_path(f"memory://{tmp_path.name}") / "file"
    content = bytes(range(256)) * (6 << 12)
    with file.new_file() as stream:
        stream.write(content)
    fetched = []
    fetch = file.read_range
    file.read_range = lambda start, end: (fetched.append(end - start), fetch(start, end))[1]  # type: ignore
    with file.open() as reader:
        assert reader.read() == content
        assert fetched == [1 << 20, 2 << 20, 3 << 20]
        for at in (5, 6_000_000, 5_999_990):
            reader.seek(at)
            assert reader.read(20) == content[at : at + 20]
        reader.seek(len(content))
        assert reader.read(1) == b""
