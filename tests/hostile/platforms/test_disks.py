"""A home on a small disk, which fills to the last byte under load: the platform says so, loses nothing, and goes on."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.completions import headers, stream
from tests.support.http import http
from tests.support.platform import SCRIPTS, Platform, running_platform
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.up.children.supervisor import DISK_CHECK_S

pytestmark = [pytest.mark.e2e, pytest.mark.lab]
OPTIONS = (
    # Two: calls that a freed page admits have a worker while the other restarts, however long it takes.
    *("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "2"),
    *("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "600"),
)
PROMPT = list(range(30, 50))


@dataclass(slots=True)
class Calls:
    """The outcomes of clients that call without end."""

    num_clients: int
    num_answered: int = 0
    num_tokens: int = 0
    refusals: list[str] = field(default_factory=list)
    num_refused: Counter[int] = field(default_factory=Counter)  # calls by client
    others: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, response: httpx.Response) -> None:
        with self.lock:
            if response.status_code == 200:
                self.num_answered += 1
                self.num_tokens += len(response.json()["choices"][0]["token_ids"])
            elif response.status_code == 507:
                self.refusals.append(response.json()["error"]["message"])
                self.num_refused[threading.get_ident()] += 1
            else:
                self.others.append(response.text)

    def await_refusals(self) -> None:
        """Until the calls of all clients have been refused, so that none waits for a worker."""
        before = self.num_refused.copy()
        wait_until(lambda: len(self.num_refused - before) == self.num_clients, "every client is refused")


@dataclass(frozen=True, slots=True)
class SmallHome:
    """A platform on a small disk, with a tenant and its model."""

    platform: Platform
    disk: SmallDisk
    key: str
    model: str
    model_folder: Path

    def call(self, num_tokens: int) -> httpx.Response:
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True}
        body["return_token_ids"] = True
        url = f"{self.platform.http}/v1/completions"
        return http.post(url, json=body, headers=headers(self.key), timeout=HANG_S)

    def num_billed(self) -> int:
        reply = http.get(f"{self.platform.http}/v1/usage", headers=headers(self.key), timeout=HANG_S).json()
        return int(reply["total"]["completion_tokens"])

    def log(self, name: str) -> str:
        return (self.disk.folder / name).read_text()

    @contextmanager
    def under_load(self, num_clients: int = 3) -> Iterator[Calls]:
        calls, ending = Calls(num_clients), threading.Event()

        def call_on() -> None:
            while not ending.is_set():
                calls.take(self.call(num_tokens=40))

        threads = [threading.Thread(target=call_on) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            ending.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHome]:
    folder = tmp_path_factory.mktemp("small")
    model = make_checkpoint(folder / "model", "llama")
    with small_disk(folder / "home", 100 << 20) as disk, running_platform(disk.folder, OPTIONS) as platform:
        key = platform.tenant("acme")
        yield SmallHome(platform, disk, key, platform.upload(key, model, "small"), model)
        disk.free()  # also after a failure: it must end well


def num_tokens_of(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return len(reply.json()["choices"][0]["token_ids"])


def assert_disk_is_named(reply: httpx.Response, disk: SmallDisk) -> None:
    assert reply.status_code == 507, reply.text
    error = reply.json()["error"]
    assert error["code"] == "disk_full" and str(disk.folder) in error["message"] and "full" in error["message"]


def test_full_disk_under_load_is_named_and_survived(home: SmallHome) -> None:
    platform, folder = home.platform, str(home.disk.folder)
    num_billed_before, incarnations = home.num_billed(), platform.incarnations()
    with home.under_load() as calls:
        wait_until(lambda: calls.num_answered > 5, "calls are answered")
        running = stream(platform, home.key, home.model, PROMPT, max_tokens=150, ignore_eos=True)
        answer = next(running)
        home.disk.fill()
        assert home.disk.free_bytes == 0 and not answer.done
        wait_until(lambda: len(calls.refusals) > 5, "calls are refused")
        for _ in running:  # what was admitted goes on to its end
            pass
        assert (len(answer.token_ids), answer.finish_reason, answer.error) == (150, "length", None)
        assert_disk_is_named(begin_upload(home), home.disk)
        for child in ("redis", "nats", "worker-0", "scheduler", "param-store"):
            platform.await_restart(child, platform.kill(child))
            home.disk.fill()  # a restart may free a page, which may admit a call
            calls.await_refusals()
        platform.await_new_slots(incarnations)
        home.disk.free()
        num_answered = calls.num_answered
        wait_until(lambda: calls.num_answered > num_answered + 5, "calls are answered again")
    assert [message for message in calls.refusals if folder not in message or "full" not in message] == []
    logs = (home.log(name)[-1500:] for name in ("up.log", "logs/scheduler.log"))
    assert calls.others == [], "\n".join((*calls.others, *logs))
    num_tokens = calls.num_tokens + len(answer.token_ids)
    wait_until(lambda: home.num_billed() - num_billed_before == num_tokens, "all that was received is billed, no more")
    assert "it is full; requests are refused" in home.log("up.log")


def test_gateway_on_a_full_disk_refuses_until_space_is_free(home: SmallHome) -> None:
    platform, disk = home.platform, home.disk
    num_billed_before = home.num_billed()
    disk.fill()
    platform.await_restart("gateway", platform.kill("gateway"))
    num_answered = 0
    while (reply := home.call(8)).status_code == 200 and num_answered < 20:  # a restart may free a page
        num_answered += 1
        disk.fill()
    assert_disk_is_named(reply, disk)
    disk.free()
    wait_until(lambda: home.call(8).status_code == 200, "calls are answered again")
    num_tokens = 8 * (num_answered + 1)
    wait_until(lambda: home.num_billed() - num_billed_before == num_tokens, "what was answered is billed, no more")


def test_upload_stopped_by_a_full_disk_resumes(home: SmallHome) -> None:
    files = {path.name: path.read_bytes() for path in sorted(home.model_folder.iterdir()) if path.is_file()}
    with httpx.Client(base_url=home.platform.http, headers=headers(home.key), timeout=HANG_S) as client:
        declared = [
            {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        ]
        url = f"/v1/uploads/{client.post('/v1/uploads', json={'model': 'stopped', 'files': declared}).json()['id']}"
        home.disk.fill()
        refused = {name: client.put(f"{url}/files/{name}", content=data) for name, data in files.items()}
        assert_disk_is_named(refused["model.safetensors"], home.disk)
        home.disk.free()
        for file in client.get(url).json()["files"]:
            if not file["complete"]:
                rest, offset = files[file["path"]][file["received"] :], {"upload-offset": str(file["received"])}
                assert client.put(f"{url}/files/{file['path']}", content=rest, headers=offset).json()["complete"]
        home.disk.fill()
        assert_disk_is_named(client.post(f"{url}/commit"), home.disk)
        home.disk.free()
        published = client.post(f"{url}/commit")
        assert published.status_code == 200 and published.json()["id"] == "acme/stopped", published.text
    answers = [
        http.post(
            f"{home.platform.http}/v1/completions",
            json={"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0},
            headers=headers(home.key),
            timeout=HANG_S,
        ).json()["choices"][0]["text"]
        for model in (home.model, "acme/stopped")
    ]
    assert answers[0] == answers[1]


def test_platform_stopped_on_a_full_disk_restarts_complete(tmp_path: Path, home: SmallHome) -> None:
    with small_disk(tmp_path / "home", 100 << 20) as disk:
        with running_platform(disk.folder, OPTIONS) as platform:
            key = platform.tenant("acme")
            before = SmallHome(platform, disk, key, platform.upload(key, home.model_folder, "small"), home.model_folder)
            num_tokens = num_tokens_of(before.call(8))
            wait_until(lambda: before.num_billed() == num_tokens, "it is billed")
            disk.fill()
            assert_disk_is_named(before.call(8), disk)
        command = (str(SCRIPTS / "torchrelay"), "up", "--home", str(disk.folder), *OPTIONS)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert ran.returncode == 1 and str(disk.folder) in ran.stderr and "a start takes" in ran.stderr, ran
        disk.free()
        with running_platform(disk.folder, OPTIONS) as platform:
            after = SmallHome(platform, disk, key, before.model, home.model_folder)
            assert after.num_billed() == num_tokens
            num_tokens += num_tokens_of(after.call(8))
            wait_until(lambda: after.num_billed() == num_tokens, "it is billed")


def test_history_is_written_again_once_space_is_free(home: SmallHome) -> None:
    """NATS stops storing when a write fails, and begins again only in a new process."""
    nats_before = home.platform.pid("nats")
    home.disk.fill()
    seen_at = time.monotonic() + 4 * DISK_CHECK_S  # by `up`, which looks so often
    with home.under_load(1) as calls:
        wait_until(lambda: len(calls.refusals) > 5 and time.monotonic() > seen_at, "calls are refused")
    home.disk.free()
    home.platform.await_restart("nats", nats_before)

    def is_recorded() -> bool:
        home.platform.upload(home.key, home.model_folder, "later")  # again: a gateway without NATS drops the event
        return "acme/later" in published(home.platform)

    wait_until(is_recorded, "the new model is in the history")


def published(platform: Platform) -> str:
    """The output of `torchrelay events` about models."""
    command = (str(SCRIPTS / "torchrelay"), "events", "--home", str(platform.home.path), "--kind", "model", "--json")
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S).stdout


def begin_upload(home: SmallHome) -> httpx.Response:
    files = [
        {"path": name, "size": 1024, "sha256": "0" * 64}
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    ]
    url = f"{home.platform.http}/v1/uploads"
    return http.post(url, json={"model": "more", "files": files}, headers=headers(home.key), timeout=HANG_S)
