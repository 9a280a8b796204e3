"""Store options: what the `CKPTMGR_*` variables say, and what is refused."""

from __future__ import annotations

import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.units import parse_duration, parse_size


def test_nothing_said() -> None:
    """Without variables, or with empty ones, the defaults hold."""
    assert StoreOptions.from_env({}) == StoreOptions() == StoreOptions.from_env({"CKPTMGR_PART_SIZE": " "})


def test_every_variable() -> None:
    """Each variable sets its option; choices are taken in any case."""
    assert StoreOptions.from_env(
        {
            "CKPTMGR_PART_SIZE": "64MiB",
            "CKPTMGR_CONCURRENCY": "8",
            "CKPTMGR_BANDWIDTH": "50MB/s",
            "CKPTMGR_CHECKSUM": "NONE",
            "CKPTMGR_ADDRESSING": "virtual",
            "CKPTMGR_SIGN_PAYLOAD": "always",
            "CKPTMGR_CREATE_ONLY": "no",
            "CKPTMGR_SSE": "AWS:KMS",
            "CKPTMGR_SSE_KEY": "arn:aws:kms:eu-west-1:1:key/k",
            "CKPTMGR_STORAGE_CLASS": "STANDARD_IA",
            "CKPTMGR_STORE_PROFILE": "minio",
            "CKPTMGR_S3_ENGINE": "boto3",
        }
    ) == StoreOptions(
        part_bytes=64 << 20,
        concurrency=8,
        max_bytes_s=50e6,
        checksum="none",
        addressing="virtual",
        sign_payload="always",
        create_only="no",
        sse="aws:kms",
        sse_key="arn:aws:kms:eu-west-1:1:key/k",
        storage_class="STANDARD_IA",
        profile="minio",
        engine="boto3",
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("CKPTMGR_PART_SIZE", "big", "64MiB"),
        ("CKPTMGR_PART_SIZE", "10", "100 KiB"),
        ("CKPTMGR_PART_SIZE", "6GiB", "5 GiB"),
        ("CKPTMGR_CONCURRENCY", "0", "1 to 256"),
        ("CKPTMGR_CONCURRENCY", "1.5", "1 to 256"),
        ("CKPTMGR_BANDWIDTH", "0", "50MB"),
        ("CKPTMGR_BANDWIDTH", "-5MB", "50MB"),
        ("CKPTMGR_BANDWIDTH", "50", "64 KiB"),
        ("CKPTMGR_CHECKSUM", "crc32", "auto, crc64nvme, none"),
        ("CKPTMGR_ADDRESSING", "pth", "did you mean path?"),
        ("CKPTMGR_SIGN_PAYLOAD", "yes", "auto, always, never"),
        ("CKPTMGR_CREATE_ONLY", "yes", "auto, no"),
        ("CKPTMGR_SSE", "aes", "AES256, aws:kms"),
        ("CKPTMGR_SSE_KEY", "k", "CKPTMGR_SSE"),
        ("CKPTMGR_STORAGE_CLASS", "Glacier", "STANDARD_IA"),
        ("CKPTMGR_S3_ENGINE", "crt", "auto, boto3"),
    ],
)
def test_wrong_values(name: str, value: str, allowed: str) -> None:
    """A wrong value is a configuration error that names the variable and says what is allowed."""
    with pytest.raises(ConfigError) as caught:
        StoreOptions.from_env({name: value})
    assert name in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"part_bytes": 0}, {"concurrency": 0}, {"max_bytes_s": 0.0}, {"checksum": "md5"}, {"sse_key": "k"}],
)
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    """The record itself refuses what makes no sense."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StoreOptions(**wrong)  # type: ignore[arg-type]


def test_a_store_is_opened_with_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """`open_store` reads the variables; options that are given go over them."""
    monkeypatch.setenv("CKPTMGR_STORAGE_CLASS", "IA")
    for url in ("s3://bucket/run", "oss://bucket/run"):
        assert open_store(url, retry=False)[0].store_options.storage_class == "IA"
        given = StoreOptions(part_bytes=5 << 20)
        assert open_store(url, retry=False, options=given)[0].store_options is given
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "many")
    with pytest.raises(ConfigError, match="CKPTMGR_CONCURRENCY"):
        open_store("/runs")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("512", 512), ("1k", 1024), ("64M", 64 << 20), ("64MiB", 64 << 20), ("64 MB", 64_000_000)),
        *(("1.5GiB", 3 << 29), ("2TB", 2 * 10**12), ("10gib", 10 << 30), ("7B", 7)),
        *(("", None), ("GiB", None), ("1 GiBs", None), ("-1", None), ("1e3", None), ("1.2.3", None)),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    """MB is a million bytes, MiB and M are 2**20; what is no size is None."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", None),
        ("120s", 120),
        ("2m", 120),
        ("2min", 120),
        ("1.5h", 5400),
        ("7d", 604800),
        ("soon", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    """A number with a unit; what is no length of time is None. "7" of a retention in days is not seven seconds."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("name", ["CKPTMGR_CONCURENCY", "CKPTMGR_PARTSIZE", "CKPTMGR_SEE", "CKPTMGR_BANDWITH"])
def test_a_misspelt_variable_is_refused(name: str) -> None:
    """What it says would not be done, and nobody would see it."""
    with pytest.raises(ConfigError, match=rf"^{name} is not known") as caught:
        StoreOptions.from_env({name: "1"})
    assert "did you mean CKPTMGR_" in (caught.value.hint or "")


def test_other_variables_are_nobodys_business() -> None:
    """Those of other parts of ckptmgr, and of others: Kubernetes makes some for a service of that name."""
    others = (
        "LOCAL_DIR",
        "RUN",
        "STORE",
        "CONFIG",
        "NOTIFY_URL",
        "RESUME_FROM",
        "LOCK_DIR",
        "PORT",
        "SERVICE_HOST",
        "TRANSFER",
    )
    assert StoreOptions.from_env({f"CKPTMGR_{name}": "x" for name in others}) == StoreOptions()
