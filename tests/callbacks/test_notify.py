"""Messages to a webhook: what they say, that each is sent once, and that training waits for none."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.notify import URL_ENV, NotifyCallback
from ckptmgr.callbacks.webhook import Webhook, body_of
from ckptmgr.core.errors import ConfigError, PermanentBackendError, ThrottledError, TransientBackendError
from ckptmgr.core.layout import parse_stem
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.transfer.status import Lag, UploadStatus

DEADLINE_S = 60.0
URL = "https://hooks.example.com/services/SECRET"


class Service:
    """A webhook on 127.0.0.1: answers what it is told to, 200 at last, and keeps what it took."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.taken: list[dict[str, Any]] = []
        self.requests: list[Mapping[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.requests.append(dict(self.headers.items()))
                status, headers, answer = service.answers.pop(0) if service.answers else (200, {}, b"ok")
                if status == 200:
                    service.taken.append(json.loads(body))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/services/SECRET"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


class Posts:
    """In place of requests: keeps bodies, raises what it is told to."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.bodies: list[dict[str, Any]] = []
        self.tries = 0
        self.go = threading.Event()
        self.go.set()

    def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
        self.tries += 1
        assert self.go.wait(DEADLINE_S)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.bodies.append(json.loads(body))
        return b""


def trainer_of(*callbacks: Any, error: Exception | None = None) -> Trainer:
    model = torch.nn.Linear(2, 1)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if error is not None and trainer.state.global_step == 2:
            raise error
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    trainer = Trainer(
        model,
        TrainingArguments(max_steps=4, logging_steps=1),
        train_dataloader=[torch.ones(1, 2)] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        callbacks=callbacks,
    )
    return trainer


# --- what is said ---------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_training_in_the_embedded_trainer_is_posted(service: Service) -> None:
    callback = NotifyCallback(service.url, events=["begin", "end", "failure"], name="exp-7", headers={"X-Token": "t"})
    trainer = trainer_of(callback)
    trainer.train()
    begin, end = service.taken
    assert begin["text"].startswith("[exp-7] training begins at step 0, after ")
    loss = trainer.state.log_history[-1]["loss"]
    assert end["text"].startswith("[exp-7] training ended at step 4, after ")
    assert end["text"].endswith(f" (loss {loss:.4g}, learning_rate 0.1)")
    assert {"event": "end", "step": 4, "rank": 0, "name": "exp-7", "interrupted": False}.items() <= end.items()
    assert end["at"].endswith("Z")
    assert end["host"]
    assert service.requests[0]["X-Token"] == "t"
    assert (callback.sent, callback.lost) == (2, 0)


def test_a_failure_is_posted_with_its_error_and_no_end(service: Service) -> None:
    with pytest.raises(RuntimeError):
        trainer_of(NotifyCallback(service.url), error=RuntimeError("CUDA\nout of memory")).train()
    (failure,) = service.taken
    assert failure["event"] == "failure"
    assert failure["error"] == "RuntimeError: CUDA out of memory"
    assert " training failed at step 2, after " in failure["text"]
    assert ": RuntimeError: CUDA out of memory (loss " in failure["text"]


def test_a_callback_that_ends_the_training_is_named(service: Service) -> None:
    class Enough(Callback):
        def on_step_end(self, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer_of(NotifyCallback(service.url), Enough()).train()
    (end,) = service.taken
    assert end["stopped"] == "Enough"
    assert "training was ended by Enough at step 1" in end["text"]


def test_an_interrupted_training_is_no_failure(service: Service) -> None:
    class Notice(Callback):
        def on_step_end(self, control: Any, state: Any, **kwargs: Any) -> None:
            control.should_interrupt = state.global_step == 2

    assert trainer_of(NotifyCallback(service.url), Notice()).train().interrupted
    (end,) = service.taken
    assert end["interrupted"] is True
    assert "training was interrupted at step 2, after " in end["text"]


def test_by_position_as_transformers_calls_it() -> None:
    posts = Posts()
    callback = NotifyCallback(URL, post=posts)
    state, control = SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True), TrainerControl()
    callback.on_train_begin(None, state, control, model=None)  # type: ignore[arg-type]
    state.global_step = 9
    callback.on_step_end(None, state, control, model=None)  # type: ignore[arg-type]
    callback.on_log(None, state, control, logs={"eval_loss": 0.5, "x": float("nan")})  # type: ignore[arg-type]
    callback.on_train_end(None, state, control, model=None)  # type: ignore[arg-type]
    (end,) = posts.bodies
    assert "training ended at step 9" in end["text"]
    assert end["text"].endswith("(eval_loss 0.5, x nan)")
    assert end["metrics"] == {"eval_loss": 0.5, "x": "nan"}


def test_only_the_main_process_sends() -> None:
    posts = Posts()
    callback = NotifyCallback(URL, post=posts, events=["begin", "end"])
    state, control = TrainerState(is_world_process_zero=False), TrainerControl()
    for hook in (callback.on_train_begin, callback.on_step_end, callback.on_exception, callback.on_train_end):
        hook(None, state, control)
    assert posts.tries == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptmgr-webhook"]


ENDS = {
    "raise ValueError('wrong data')": ("failure", "failed at step 5", "ValueError: wrong data"),
    "sys.exit(3)": ("failure", "failed at step 5", "its process ended before it did"),
    "pass": ("failure", "failed at step 5", "its process ended before it did"),
    "control.should_training_stop = True; sys.exit(143)": (
        "end",
        "was ended, and its process with it, at step 5",
        None,
    ),
}


@pytest.mark.parametrize("ends", ENDS)
def test_where_the_host_says_nothing_of_the_end_that_of_the_process_does(ends: str, service: Service) -> None:
    program = f"""
import sys
from types import SimpleNamespace
from ckptmgr.callbacks.notify import NotifyCallback
callback = NotifyCallback(name="run")
state, control = SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True), SimpleNamespace()
callback.on_train_begin(None, state, control)
state.global_step = 5
callback.on_step_end(None, state, control)
{ends}
"""
    environment = {
        "PATH": "/usr/bin:/bin",
        URL_ENV: service.url,
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    subprocess.run(
        [sys.executable, "-c", program], env=environment, timeout=DEADLINE_S, check=False, stderr=subprocess.DEVNULL
    )
    (told,) = service.taken
    event, how, error = ENDS[ends]
    assert (told["event"], told["step"], told.get("error")) == (event, 5, error)
    assert told["text"].startswith(f"[run] training {how}, after ")


# --- durability -----------------------------------------------------------------------------------------------------------------


def stem_of(step: int) -> Any:
    return parse_stem(f"000001-{step:012}-000001-0123abcd")


class Checkpoints:
    """A manager of checkpoints whose uploads are as a test says."""

    url = "s3://bucket/exp/run-7"

    def __init__(self) -> None:
        self.uploads = UploadStatus()
        self.looked = threading.Semaphore(0)
        self.threads: set[str] = set()

    def status(self) -> Any:
        self.threads.add(threading.current_thread().name)
        found = SimpleNamespace(uploads=self.uploads)
        self.looked.release()
        return found


def behind(step: int, durable: int | None) -> UploadStatus:
    lag = Lag(stem=stem_of(step), durable=None if durable is None else stem_of(durable))
    return UploadStatus(pending=(stem_of(step),), lag=lag, last_error="s3 put: timed out")


def test_saves_that_do_not_become_durable_are_said_once_and_again_when_they_do() -> None:
    now, posts, manager = [0.0], Posts(), Checkpoints()
    holder = SimpleNamespace(on_save=lambda **kwargs: None, manager=manager)
    callback = NotifyCallback(URL, post=posts, lag_s=600, check_interval_s=60, clock=lambda: now[0], events=["lag"])
    callbacks = CallbackManager([callback, holder])
    state, control = TrainerState(), TrainerControl()

    def call(event: str) -> None:
        callbacks.call(event, args=None, state=state, control=control)

    def step(at_s: float, uploads: UploadStatus) -> None:
        now[0] = at_s
        manager.uploads = uploads
        state.global_step += 1
        call("on_step_end")
        assert manager.looked.acquire(timeout=DEADLINE_S)

    call("on_train_begin")
    step(100, behind(10, None))
    now[0] = 120
    call("on_step_end")  # too early for another look
    assert not manager.looked.acquire(blocking=False)
    # New saves, none of them durable: it is the same waiting.
    step(400, behind(20, None))
    step(750, behind(30, None))
    step(900, behind(40, None))
    step(1000, behind(40, 30))  # something became durable
    step(1500, behind(50, 30))
    step(1700, behind(60, 30))
    step(1800, UploadStatus())
    call("on_train_end")
    nothing = "nothing that was saved has become durable"
    error = "s3 put: timed out"
    assert [body["lag"] for body in posts.bodies] == [True, False, True, False]
    assert [body["text"].partition("] saves ")[2] for body in posts.bodies] == [
        f"do not reach the store at step 3, after 12 min 30 s: for 10 min 50 s {nothing}, nothing is; {error}",
        "become durable again at step 5, after 16 min 40 s",
        f"do not reach the store at step 7, after 28 min 20 s: for 11 min 40 s {nothing}, the newest that is: step 30; {error}",
        "become durable again at step 8, after 30 min",
    ]
    assert all(body["name"] == "run-7" for body in posts.bodies)
    # Not in the training thread, which a slow disk would hold up; there only at the end.
    assert manager.threads == {"ckptmgr-webhook", threading.current_thread().name}


def test_the_end_tells_how_many_saves_are_not_in_the_store() -> None:
    posts, manager = Posts(), Checkpoints()
    manager.uploads = behind(7, None)
    trainer_of(NotifyCallback(URL, post=posts, manager=manager)).train()
    assert posts.bodies[0]["pending"] == 1
    assert "; 1 save(s) not in the store yet (" in posts.bodies[0]["text"]


# --- sending --------------------------------------------------------------------------------------------------------------------


def webhook(posts: Callable[..., bytes], **options: Any) -> tuple[Webhook, list[float]]:
    waits: list[float] = []
    policy = RetryPolicy(attempts=4, deadline_s=100.0, base_s=1.0, cap_s=4.0)
    return Webhook(URL, post=posts, policy=policy, sleep=waits.append, **options), waits


def test_what_may_pass_is_tried_again_in_order() -> None:
    posts = Posts(TransientBackendError("down"), ThrottledError("slower", retry_after_s=7.0))
    hook, waits = webhook(posts)
    hook.send({"text": "first"})
    hook.send({"text": "second"})
    assert hook.close(DEADLINE_S)
    assert [body["text"] for body in posts.bodies] == ["first", "second"]
    assert posts.tries == 4
    assert len(waits) == 2
    assert waits[1] == 7.0
    assert (hook.sent, hook.lost) == (2, 0)


def test_what_is_given_up_is_said_once_without_the_url_and_the_next_one_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = [PermanentBackendError("hooks.example.com answered 404"), PermanentBackendError("again 404")]
    posts = Posts(*refused, *[TransientBackendError("down")] * 4)
    hook, _ = webhook(posts)
    for text in ("refused", "refused", "down", "taken"):
        hook.send({"text": text})
    assert not hook.close(DEADLINE_S)
    assert [body["text"] for body in posts.bodies] == ["taken"]
    assert (hook.sent, hook.lost) == (1, 3)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "a message to hooks.example.com was not sent: hooks.example.com answered 404",
    ]
    assert "SECRET" not in caplog.text


def test_training_waits_for_nothing_and_too_many_messages_cost_the_oldest() -> None:
    posts = Posts()
    posts.go.clear()
    hook, _ = webhook(posts, capacity=3)
    for number in range(6):
        hook.send({"text": str(number)})
    posts.go.set()
    hook.close(DEADLINE_S)
    texts = [body["text"] for body in posts.bodies]
    assert texts[-3:] == ["3", "4", "5"]
    assert hook.sent + hook.lost == 6
    assert hook.lost >= 2


def test_the_end_waits_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    posts = Posts()
    posts.go.clear()
    hook, _ = webhook(posts)
    hook.send({"text": "1"})
    hook.send({"text": "2"})
    assert not hook.close(0.05)
    assert "message(s) for hooks.example.com could not be sent in 0 s" in caplog.text
    posts.go.set()


def test_a_real_service_that_fails_first(service: Service) -> None:
    service.answers = [(503, {"Retry-After": "0"}, b""), (429, {"Retry-After": "0"}, b"")]
    policy = RetryPolicy(attempts=5, deadline_s=60.0, base_s=0.001, cap_s=0.002)
    hook = Webhook(service.url, policy=policy)
    hook.send({"text": "hello"})
    assert hook.close(DEADLINE_S)
    assert service.taken == [{"text": "hello"}]
    assert len(service.requests) == 3


def test_real_refusals_and_a_service_that_is_not_there(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.answers = [(404, {}, b"no such hook")]
    policy = RetryPolicy(attempts=2, deadline_s=60.0, base_s=0.001, cap_s=0.002)
    hook = Webhook(service.url, policy=policy)
    hook.send({"text": "refused"})
    hook.close(DEADLINE_S)
    assert "127.0.0.1 answered 404 - look at the URL and the format of the webhook" in caplog.text
    service.close()
    hook = Webhook(service.url, policy=policy)
    hook.send({"text": "nobody"})
    assert not hook.close(DEADLINE_S)
    assert "127.0.0.1 cannot be reached: " in caplog.text
    assert "(gave up after 2 tries" in caplog.text
    assert "SECRET" not in caplog.text


def test_services_that_refuse_with_200_are_understood(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.answers = [
        (200, {}, json.dumps({"errcode": 310000, "errmsg": "keywords not in content"}).encode()),
        (200, {}, json.dumps({"errcode": 0, "errmsg": "ok"}).encode()),
    ]
    hook = Webhook(service.url, form="dingtalk")
    hook.send({"text": "a"})
    hook.send({"text": "b"})
    hook.close(DEADLINE_S)
    assert (hook.sent, hook.lost) == (1, 1)
    assert "refused the message: keywords not in content (errcode 310000)" in caplog.text


def test_each_service_gets_its_own_form() -> None:
    message = {"text": "hi", "step": 3}
    assert body_of(message, "json") == message
    assert body_of(message, "slack") == {"text": "hi"}
    assert body_of({"text": "x" * 3000}, "discord") == {"content": "x" * 2000}
    assert body_of(message, "dingtalk") == body_of(message, "wecom") == {"msgtype": "text", "text": {"content": "hi"}}
    assert body_of(message, "feishu") == {"msg_type": "text", "content": {"text": "hi"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, f"NotifyCallback: there is no url - give one, or set {URL_ENV}"),
        ({"url": "file:///etc/passwd"}, "the URL of the webhook is none"),
        ({"url": URL, "events": ["ends"]}, "events is 'ends' - events must be one of 'begin'"),
        ({"url": URL, "lag_s": 0}, "lag_s is 0"),
        ({"url": URL, "attempts": 0}, "attempts is 0"),
        ({"url": URL, "format": "teams"}, "no form 'teams' - use one of 'json'"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_ENV, raising=False)
    with pytest.raises(ConfigError) as caught:
        NotifyCallback(**arguments)
    assert message in str(caught.value)
    assert "passwd" not in str(caught.value)
