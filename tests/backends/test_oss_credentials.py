"""Aliyun's chain of credentials: what is found where, and how keys are kept and renewed. No request goes beyond 127.0.0.1."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from ckptmgr.backends.osscredentials import Keys, OssCredentials
from ckptmgr.backends.osskeysources import default_chain
from ckptmgr.backends.ossremotekeys import AssumedRole, signature_of
from ckptmgr.core.errors import AccessDeniedError, BackendTimeoutError, CkptmgrError, ConfigError, TransientBackendError
from ckptmgr.testing.metadata import ALIYUN_ROLES_PATH, MetadataServer

SECRET = "very-secret"
LATER = datetime.now(timezone.utc) + timedelta(hours=1)


def keys_by(environ: dict[str, str]) -> Keys:
    return OssCredentials(default_chain(environ)).current()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A machine on which nothing is configured, and which is no ECS instance."""
    return {"HOME": str(tmp_path), "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true"}


@pytest.fixture
def metadata(environ: dict[str, str]) -> Iterator[MetadataServer]:
    """An ECS instance, without a RAM role."""
    with MetadataServer() as server:
        del environ["ALIBABA_CLOUD_ECS_METADATA_DISABLED"]
        environ.update(server.env)
        yield server


def attach(server: MetadataServer, number: int = 1, role: str = "trainer", *, expires: datetime = LATER) -> Keys:
    keys = Keys(
        access_key_id=f"STS.{number}",
        secret=f"{SECRET}-{number}",
        token=f"token-{number}",
        expires_s=expires.timestamp(),
    )
    server.attach_aliyun_role(
        role, access_key=keys.access_key_id, secret_key=keys.secret, token=keys.token, expires=expires
    )
    return Keys(
        access_key_id=keys.access_key_id,
        secret=keys.secret,
        token=keys.token,
        expires_s=float(int(expires.timestamp())),
    )


def write_cli(environ: dict[str, str], *profiles: dict[str, Any], current: str = "default") -> Path:
    path = Path(environ["HOME"]) / ".aliyun" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"current": current, "profiles": list(profiles)}))
    return path


def write_ini(environ: dict[str, str], text: str, name: str = "credentials") -> Path:
    path = Path(environ["HOME"]) / ".alibabacloud" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


AK = {"name": "default", "mode": "AK", "access_key_id": "cli-id", "access_key_secret": SECRET}


class Answers:
    """A server that answers each request with what a function says, and keeps what it was asked."""

    def __init__(self, answer: Callable[[str, dict[str, str]], tuple[int, Any]]) -> None:
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode())))

            def do_PUT(self) -> None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _answer(self, form: dict[str, str]) -> None:
                outer.asked.append((self.command, self.path, form))
                status, document = answer(self.path, form)
                body = (document if isinstance(document, str) else json.dumps(document)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Answers:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sts_answer(number: int = 1) -> dict[str, Any]:
    return {
        "RequestId": "1",
        "Credentials": {
            "AccessKeyId": f"STS.{number}",
            "AccessKeySecret": SECRET,
            "SecurityToken": f"token-{number}",
            "Expiration": LATER.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
    }


# -- what is found where ------------------------------------------------------------------------------------------


def test_the_environment_goes_first_and_is_read_each_time(environ: dict[str, str]) -> None:
    """OSS's own names before those of the cloud; whoever renews a token there is heard at the next request."""
    write_cli(environ, AK)
    environ.update(ALIBABA_CLOUD_ACCESS_KEY_ID="cloud-id", ALIBABA_CLOUD_ACCESS_KEY_SECRET=SECRET)
    credentials = OssCredentials(default_chain(environ))
    assert credentials.current().access_key_id == "cloud-id"
    environ["ALIBABA_CLOUD_SECURITY_TOKEN"] = "token"
    assert credentials.current().token == "token"
    environ.update(OSS_ACCESS_KEY_ID="oss-id", OSS_ACCESS_KEY_SECRET=SECRET)
    assert (credentials.current().access_key_id, credentials.current().token) == ("oss-id", "")
    assert credentials.found_in == "the environment"


@pytest.mark.parametrize(("given", "missing"), [("ID", "SECRET"), ("SECRET", "ID")])
def test_half_a_pair_is_named(environ: dict[str, str], given: str, missing: str) -> None:
    """Not passed over in favour of somebody else's keys."""
    write_cli(environ, AK)
    environ[f"OSS_ACCESS_KEY_{given}"] = SECRET
    with pytest.raises(AccessDeniedError, match=rf"OSS_ACCESS_KEY_{given} is set without OSS_ACCESS_KEY_{missing}"):
        keys_by(environ)


def test_the_profiles_of_the_aliyun_command(environ: dict[str, str]) -> None:
    """The current one, or the one that ALIBABA_CLOUD_PROFILE names; static keys and tokens."""
    sts = {"name": "lab", "mode": "StsToken", "access_key_id": "a", "access_key_secret": SECRET, "sts_token": "t"}
    write_cli(environ, AK, sts)
    assert keys_by(environ) == Keys(access_key_id="cli-id", secret=SECRET)
    write_cli(environ, AK, sts, current="lab")
    assert keys_by(environ) == Keys(access_key_id="a", secret=SECRET, token="t")
    environ["ALIBABA_CLOUD_PROFILE"] = "default"
    assert keys_by(environ).access_key_id == "cli-id"
    environ["ALIBABA_CLOUD_CLI_PROFILE_DISABLED"] = "true"
    with pytest.raises(AccessDeniedError, match="no OSS credentials were found"):
        keys_by(environ)


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([{**AK, "mode": "OAuth"}], "'OAuth', which is not supported"),
        ([{**AK, "access_key_secret": ""}], "has no access_key_secret in profile 'default'"),
        (["nonsense"], "not a configuration of the aliyun command"),
        ([{**AK, "mode": "ChainableRamRoleArn", "source_profile": "default"}], "lead to each other"),
        ([{**AK, "mode": "ChainableRamRoleArn", "source_profile": "gone"}], "has no profile 'gone'"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named(environ: dict[str, str], profiles: list[Any], words: str) -> None:
    """Neither passed over, nor quoted."""
    write_cli(environ, *profiles)
    with pytest.raises(ConfigError, match=words) as caught:
        keys_by(environ)
    assert SECRET not in str(caught.value)


def test_the_credentials_file(environ: dict[str, str], tmp_path: Path) -> None:
    """Its section `default`, or the one that is named; comments; another file by name; either of two names."""
    text = f"[default]   # mine\ntype = access_key  # kind\naccess_key_id = ini-id\naccess_key_secret = {SECRET}\n"
    path = write_ini(environ, text, "credentials.ini")
    assert keys_by(environ) == Keys(access_key_id="ini-id", secret=SECRET)
    write_ini(environ, text.replace("ini-id", "other"))
    assert keys_by(environ).access_key_id == "other"
    environ["ALIBABA_CLOUD_CREDENTIALS_FILE"] = str(path)
    assert keys_by(environ).access_key_id == "ini-id"
    path.write_text(f"{text}[lab]\ntype = sts\naccess_key_id = s\naccess_key_secret = {SECRET}\nsecurity_token = t\n")
    environ["ALIBABA_CLOUD_PROFILE"] = "lab"
    assert keys_by(environ) == Keys(access_key_id="s", secret=SECRET, token="t")
    path.write_text("[lab]\ntype = rsa_key_pair\n")
    with pytest.raises(ConfigError, match="rsa_key_pair"):
        keys_by(environ)
    path.write_text(f"{SECRET}\n")
    with pytest.raises(ConfigError, match="sections") as caught:
        keys_by(environ)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_nothing_anywhere(environ: dict[str, str]) -> None:
    """What was looked at is named, and what to do."""
    with pytest.raises(AccessDeniedError, match=r"the environment.*config\.json.*credentials.*OSS_ACCESS_KEY_ID"):
        keys_by(environ)


def test_the_order_of_the_chain(environ: dict[str, str], metadata: MetadataServer, tmp_path: Path) -> None:
    """The CLI's profile, the credentials file, the instance's role, the credentials URI: as in Aliyun's SDKs."""
    role = attach(metadata)
    with Answers(lambda path, form: (200, {"Code": "Success", **sts_answer(9)["Credentials"]})) as helper:
        environ["ALIBABA_CLOUD_CREDENTIALS_URI"] = helper.url
        cli = write_cli(environ, AK)
        ini = write_ini(environ, f"[default]\naccess_key_id = ini-id\naccess_key_secret = {SECRET}\n")
        assert keys_by(environ).access_key_id == "cli-id"
        cli.unlink()
        assert keys_by(environ).access_key_id == "ini-id"
        ini.unlink()
        assert keys_by(environ) == role
        metadata.detach_aliyun_role()
        assert keys_by(environ).access_key_id == "STS.9"


# -- who hands them out for some time ------------------------------------------------------------------------------


def test_the_role_of_the_instance(environ: dict[str, str], metadata: MetadataServer) -> None:
    """Its name is found, or given; requests carry a session token, without which the service refuses them here."""
    expected = attach(metadata)
    assert keys_by(environ) == expected
    environ["ALIBABA_CLOUD_ECS_METADATA"] = "trainer"
    found = len(metadata.requests)
    assert keys_by(environ) == expected
    asked = [(request.method, request.path) for request in metadata.requests[found:]]
    assert asked == [("PUT", "/latest/api/token"), ("GET", f"{ALIYUN_ROLES_PATH}trainer")]
    assert "ALIBABA_CLOUD_ECS_METADATA" not in repr(expected)


def test_an_instance_without_that_role(environ: dict[str, str], metadata: MetadataServer) -> None:
    """None is found: go on. One was named: say so, for good."""
    with pytest.raises(AccessDeniedError, match="no OSS credentials were found"):
        keys_by(environ)
    environ["ALIBABA_CLOUD_ECS_METADATA"] = "trainer"
    with pytest.raises(AccessDeniedError, match=r"'trainer', status 404.*attach a RAM role"):
        keys_by(environ)
    attach(metadata)
    metadata.attach_aliyun_role(
        "trainer", access_key="a", secret_key=SECRET, token=SECRET, expires=LATER, code="Broken"
    )
    with pytest.raises(AccessDeniedError, match="Broken") as caught:
        keys_by(environ)
    assert SECRET not in str(caught.value)


def test_no_instance_and_an_instance_in_trouble(environ: dict[str, str], metadata: MetadataServer) -> None:
    """A service that is not there is nothing when a role is looked for, and a failure that may pass when it is named."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environ["CKPTMGR_ALIYUN_METADATA_ENDPOINT"] = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(AccessDeniedError, match="no OSS credentials were found"):
        keys_by(environ)
    environ["ALIBABA_CLOUD_ECS_METADATA"] = "trainer"
    with pytest.raises(BackendTimeoutError, match="does not answer"):
        keys_by(environ)
    environ.update(metadata.env)
    metadata.fail(500)
    with pytest.raises(TransientBackendError, match="status 500"):
        keys_by(environ)


def test_an_instance_without_session_tokens(environ: dict[str, str]) -> None:
    """They are done without where the service has none, unless that is forbidden."""

    def answer(path: str, form: dict[str, str]) -> tuple[int, Any]:
        keys = {"Code": "Success", **sts_answer()["Credentials"]}
        return (200, "trainer" if path == ALIYUN_ROLES_PATH else keys)

    with Answers(answer) as old:
        del environ["ALIBABA_CLOUD_ECS_METADATA_DISABLED"]
        environ["CKPTMGR_ALIYUN_METADATA_ENDPOINT"] = old.url
        assert keys_by(environ).access_key_id == "STS.1"
        environ["ALIBABA_CLOUD_IMDSV1_DISABLED"] = "true"
        with pytest.raises(AccessDeniedError, match="no session token"):
            keys_by(environ)


def test_a_credentials_uri(environ: dict[str, str]) -> None:
    """It answers as the metadata service does; what it answers, and all of it but the host, stays out of messages."""
    answers: list[tuple[int, Any]] = [
        (200, {"Code": "Success", **sts_answer()["Credentials"]}),
        (403, SECRET),
        (200, {"Code": "Success", "AccessKeyId": SECRET}),
        (200, SECRET),
    ]
    with Answers(lambda path, form: answers.pop(0)) as helper:
        environ["ALIBABA_CLOUD_CREDENTIALS_URI"] = f"{helper.url}/{SECRET}?{SECRET}"
        assert keys_by(environ).token == "token-1"
        assert helper.asked[0][:2] == ("GET", f"/{SECRET}?{SECRET}")
        while answers:
            with pytest.raises(AccessDeniedError, match=r"the credentials URI at 127\.0\.0\.1") as caught:
                keys_by(environ)
            assert SECRET not in str(caught.value)
    environ["ALIBABA_CLOUD_CREDENTIALS_URI"] = f"file:///{SECRET}"
    with pytest.raises(ConfigError, match="ALIBABA_CLOUD_CREDENTIALS_URI") as wrong:
        keys_by(environ)
    assert SECRET not in str(wrong.value)


def test_an_oidc_role(environ: dict[str, str], tmp_path: Path) -> None:
    """Before all files (RRSA); its token is read each time, and sent in a body."""
    write_cli(environ, AK)
    token = tmp_path / "token"
    answers: list[tuple[int, Any]] = [
        (200, sts_answer()),
        (400, {"Code": "AuthenticationFail.OIDCToken.Expired", "Message": SECRET}),
        (400, {"Code": "Throttling.User"}),
        (503, "busy"),
    ]
    with Answers(lambda path, form: answers.pop(0)) as sts:
        environ.update(
            ALIBABA_CLOUD_ROLE_ARN="acs:ram::1:role/pod",
            ALIBABA_CLOUD_OIDC_PROVIDER_ARN="acs:ram::1:oidc-provider/ack",
            ALIBABA_CLOUD_OIDC_TOKEN_FILE=str(token),
            CKPTMGR_ALIYUN_STS_ENDPOINT=sts.url,
        )
        with pytest.raises(AccessDeniedError, match="No such file"):
            keys_by(environ)
        token.write_text(f"{SECRET}\n")
        assert keys_by(environ).token == "token-1"
        method, path, form = sts.asked[0]
        assert (method, path) == ("POST", "/")
        asked = {name: form[name] for name in ("Action", "RoleArn", "OIDCProviderArn", "OIDCToken", "RoleSessionName")}
        assert asked == {
            "Action": "AssumeRoleWithOIDC",
            "RoleArn": "acs:ram::1:role/pod",
            "OIDCProviderArn": "acs:ram::1:oidc-provider/ack",
            "OIDCToken": SECRET,
            "RoleSessionName": "ckptmgr",
        }
        with pytest.raises(AccessDeniedError, match=r"role/pod: AuthenticationFail\.OIDCToken\.Expired") as caught:
            keys_by(environ)
        assert SECRET not in str(caught.value)
        for words in ("Throttling", "status 503"):
            with pytest.raises(TransientBackendError, match=words):
                keys_by(environ)


def test_the_endpoint_of_sts(environ: dict[str, str]) -> None:
    """The region's, also within a VPC, if one is named; else the one for all regions."""

    def endpoint(**variables: str) -> str:
        return AssumedRole(default_chain(environ)[0], "r", session="", environ=variables)._endpoint

    assert endpoint() == "https://sts.aliyuncs.com"
    assert endpoint(ALIBABA_CLOUD_STS_REGION="cn-beijing") == "https://sts.cn-beijing.aliyuncs.com"
    vpc = endpoint(ALIBABA_CLOUD_STS_REGION="cn-beijing", ALIBABA_CLOUD_VPC_ENDPOINT_ENABLED="true")
    assert vpc == "https://sts-vpc.cn-beijing.aliyuncs.com"


def test_a_role_that_other_keys_may_assume(environ: dict[str, str]) -> None:
    """Of a profile with keys, and of one that begins with another; the request is signed."""
    role = {**AK, "mode": "RamRoleArn", "ram_role_arn": "acs:ram::1:role/a", "ram_session_name": "me"}
    top = {
        "name": "top",
        "mode": "ChainableRamRoleArn",
        "source_profile": "default",
        "ram_role_arn": "acs:ram::1:role/b",
        "external_id": "x",
    }
    with Answers(lambda path, form: (200, sts_answer(1 if form["RoleArn"].endswith("a") else 2))) as sts:
        environ["CKPTMGR_ALIYUN_STS_ENDPOINT"] = sts.url
        write_cli(environ, role, top)
        assert keys_by(environ).access_key_id == "STS.1"
        write_cli(environ, role, top, current="top")
        assert keys_by(environ).access_key_id == "STS.2"
        chain = default_chain(environ)
        assert chain[1].fetch() is not None
        write_cli(environ, {**role, "access_key_id": "rotated"}, top, current="top")
        assert chain[1].fetch() is not None
        assert sts.asked[-2][2]["AccessKeyId"] == "rotated"
        del sts.asked[3:]
        forms = [form for _, _, form in sts.asked]
    assert [(form["AccessKeyId"], form.get("SecurityToken"), form.get("ExternalId")) for form in forms] == [
        ("cli-id", None, None),
        ("cli-id", None, None),
        ("STS.1", "token-1", "x"),
    ]
    for form in forms:
        signature = form.pop("Signature")
        keys = Keys(access_key_id=form["AccessKeyId"], secret=SECRET, token=form.get("SecurityToken", ""))
        assert signature_of(form, keys)["Signature"] == signature


def test_the_signature_of_the_documentation() -> None:
    """Source: https://www.alibabacloud.com/help/en/sdk/product-overview/rpc-mechanism"""
    form = {
        "Timestamp": "2016-02-23T12:46:24Z",
        "Format": "XML",
        "Action": "DescribeRegions",
        "SignatureNonce": "3ee8c1b8-83d3-44af-a94f-4e0ad82fd6cf",
        "Version": "2014-05-26",
    }
    keys = Keys(access_key_id="testid", secret="testsecret")
    assert signature_of(form, keys, method="GET")["Signature"] == "OLeaidS1JvxuMvnyHOwuJ+uX5qY="


def test_profiles_that_lead_to_a_service(environ: dict[str, str], metadata: MetadataServer, tmp_path: Path) -> None:
    """The role of the instance, a credentials URI and an OIDC role, named by a profile of either file; no other names are looked for."""
    role = attach(metadata)
    environ["ALIBABA_CLOUD_ECS_METADATA_DISABLED"] = "true"
    token = tmp_path / "token"
    token.write_text("t")

    def answer(path: str, form: dict[str, str]) -> tuple[int, Any]:
        number = {"": 5, "acs:oidc": 6, "acs:ak": 7}[form.get("RoleArn", "")]
        return 200, {"Code": "Success", **sts_answer(number)["Credentials"], **sts_answer(number)}

    with Answers(answer) as service:
        environ["CKPTMGR_ALIYUN_STS_ENDPOINT"] = service.url
        oidc = {"ram_role_arn": "acs:oidc", "oidc_provider_arn": "p", "oidc_token_file": str(token)}
        for profile, expected in (
            ({"mode": "EcsRamRole", "ram_role_name": "trainer"}, role.access_key_id),
            ({"mode": "EcsRamRole"}, role.access_key_id),
            ({"mode": "CredentialsURI", "credentials_uri": service.url}, "STS.5"),
            ({"mode": "OIDC", **oidc}, "STS.6"),
        ):
            write_cli(environ, {"name": "default", **profile})
            assert keys_by(environ).access_key_id == expected, profile
        environ["ALIBABA_CLOUD_CLI_PROFILE_DISABLED"] = "true"
        for text, expected in (
            ("type = ecs_ram_role\nrole_name = trainer", role.access_key_id),
            (f"type = ram_role_arn\nrole_arn = acs:ak\naccess_key_id = a\naccess_key_secret = {SECRET}", "STS.7"),
            (
                f"type = oidc_role_arn\nrole_arn = acs:oidc\noidc_provider_arn = p\noidc_token_file_path = {token}",
                "STS.6",
            ),
        ):
            write_ini(environ, f"[default]\n{text}\n")
            assert keys_by(environ).access_key_id == expected, text


def test_a_file_that_may_not_be_read(environ: dict[str, str]) -> None:
    """Not taken for one that is not there."""
    path = write_cli(environ, AK)
    path.unlink()
    path.mkdir()
    with pytest.raises(AccessDeniedError, match=r"config\.json cannot be read: Is a directory"):
        keys_by(environ)
    path.rmdir()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AccessDeniedError, match="it is not text"):
        keys_by(environ)


# -- how they are kept ---------------------------------------------------------------------------------------------


class Giver:
    """A source whose keys last `life_s`, and which may be held, or fail."""

    name = "the giver"
    is_cheap = False

    def __init__(self, clock: Clock, life_s: float = 1000.0) -> None:
        self.clock = clock
        self.life_s = life_s
        self.given = 0
        self.error: CkptmgrError | None = None
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def fetch(self) -> Keys | None:
        self.given += 1
        self.asked.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        number = self.given
        return Keys(access_key_id=f"id-{number}", secret=SECRET, token=SECRET, expires_s=self.clock.now_s + self.life_s)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def giver(clock: Clock) -> Giver:
    return Giver(clock)


@pytest.fixture
def credentials(clock: Clock, giver: Giver) -> OssCredentials:
    return OssCredentials([giver], now=clock, clock=clock)


def test_keys_are_kept_until_a_fifth_of_their_life_is_left(
    credentials: OssCredentials, clock: Clock, giver: Giver
) -> None:
    """Or fifteen minutes, if that is less."""
    for life_s, after_s in ((1000.0, 800.0), (36_000.0, 35_100.0)):
        giver.life_s = life_s
        first = credentials.current()
        clock.now_s += after_s - 1
        assert credentials.current() is first
        clock.now_s += 1
        giver.life_s = 36_000.0
        assert credentials.current() != first


def test_keys_that_never_expire_are_asked_for_once(clock: Clock) -> None:
    """As those of a file."""

    class Fixed(Giver):
        def fetch(self) -> Keys | None:
            self.given += 1
            return Keys(access_key_id="a", secret=SECRET)

    fixed = Fixed(clock)
    credentials = OssCredentials([fixed], now=clock, clock=clock)
    for _ in range(3):
        credentials.current()
        clock.now_s += 1e7
    assert fixed.given == 1


def test_a_wrong_clock_does_not_ask_all_the_time(credentials: OssCredentials, clock: Clock, giver: Giver) -> None:
    """Keys that seem to have expired before they came are used for a minute: the store decides."""
    giver.life_s = -5000.0
    first = credentials.current()
    clock.now_s += 40.0
    assert credentials.current() is first
    assert giver.given == 1


def test_one_thread_renews_while_others_go_on(credentials: OssCredentials, clock: Clock, giver: Giver) -> None:
    """As long as the old keys are valid, nobody waits but the one who asks."""
    first = credentials.current()
    clock.now_s += 900.0
    giver.asked.clear()
    giver.go_on.clear()
    found: list[Keys] = []
    thread = threading.Thread(target=lambda: found.append(credentials.current()))
    thread.start()
    assert giver.asked.wait(60)
    assert credentials.current() is first
    giver.go_on.set()
    thread.join(60)
    assert found == [credentials.current()]
    assert found[0].access_key_id == "id-2"
    assert giver.given == 2


def test_those_who_wait_share_what_comes(credentials: OssCredentials, giver: Giver) -> None:
    """Keys, and a failure too: eight threads are one question to the service."""
    for error in (None, AccessDeniedError("no")):
        giver.error, before = error, giver.given
        giver.asked.clear()
        giver.go_on.clear()
        fresh = OssCredentials([giver], now=giver.clock)
        outcomes: list[object] = []

        def ask(asked: OssCredentials = fresh, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(asked.current())
            except AccessDeniedError as caught:
                outcomes.append(str(caught))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        threads[0].start()
        assert giver.asked.wait(60)
        for thread in threads[1:]:
            thread.start()
        # They are in, or will find the answer there.
        giver.go_on.set()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 8
        assert len(set(outcomes)) == 1
        if error is None:
            assert giver.given == before + 1


def test_a_failed_renewal_is_told_and_tried_again(
    credentials: OssCredentials, clock: Clock, giver: Giver, caplog: pytest.LogCaptureFixture
) -> None:
    """The old keys go on as long as they are valid; then the failure is everybody's."""
    first = credentials.current()
    giver.error = TransientBackendError("busy")
    clock.now_s += 850.0
    with caplog.at_level(logging.DEBUG):
        assert credentials.current() is first
        assert credentials.current() is first
    assert giver.given == 2
    assert ["could not be renewed" in record.message for record in caplog.records] == [True]
    clock.now_s += 60.0
    assert credentials.current() is first
    assert giver.given == 3
    clock.now_s += 100.0
    with pytest.raises(TransientBackendError, match="busy"):
        credentials.current()
    giver.error = None
    assert credentials.current() != first
    assert SECRET not in caplog.text


def test_keys_that_the_store_refuses_are_renewed_once(credentials: OssCredentials, clock: Clock, giver: Giver) -> None:
    """By the first who asks; others get what it found; when that is refused too, there is nothing more to get."""
    first = credentials.current()
    second = credentials.renew(first)
    assert second is not None
    assert second != first
    assert credentials.renew(first) is second
    assert credentials.current() is second
    assert giver.given == 2
    assert credentials.renew(second) is None
    assert giver.given == 2
    clock.now_s += 60.0
    assert credentials.renew(second) not in (None, second)


def test_keys_that_are_written_down_are_read_again(environ: dict[str, str]) -> None:
    """A file that somebody has rewritten, an environment that has changed; the same again is not worth another request."""
    write_cli(environ, AK)
    credentials = OssCredentials(default_chain(environ))
    old = credentials.current()
    assert credentials.renew(old) is None
    write_cli(environ, {**AK, "access_key_id": "new-id"})
    assert credentials.current() is old
    renewed = credentials.renew(old)
    assert renewed is not None
    assert renewed.access_key_id == "new-id"
    environ.update(OSS_ACCESS_KEY_ID="e", OSS_ACCESS_KEY_SECRET=SECRET)
    credentials = OssCredentials(default_chain(environ))
    seen = credentials.current()
    assert credentials.renew(seen) is None
    environ["OSS_SESSION_TOKEN"] = "t"
    assert credentials.renew(seen) == Keys(access_key_id="e", secret=SECRET, token="t")


def test_nothing_secret_is_shown() -> None:
    """Neither by `repr`, which ends in logs and tracebacks, nor by the object that keeps them."""
    keys = Keys(access_key_id="id", secret=SECRET, token=SECRET)
    assert SECRET not in f"{keys} {keys!r}"
    assert "id" in repr(keys)
