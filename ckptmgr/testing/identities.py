"""Who may use a test store, and what for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One pair of keys and its permissions. Reading is always allowed.

    Attributes:
        name: what tests call it (`server.env_of("no-list")`).
        access_key: the public half.
        secret_key: the secret half.
        may_list: whether it may list a bucket's keys.
        may_write: whether it may create, replace and delete objects.
    """

    name: str
    access_key: str
    secret_key: str
    may_list: bool = True
    may_write: bool = True


ADMIN = Identity(name="admin", access_key="ckptmgr-admin", secret_key="ckptmgr-admin-secret")
NO_LIST = Identity(name="no-list", access_key="ckptmgr-no-list", secret_key="ckptmgr-no-list-secret", may_list=False)
READ_ONLY = Identity(name="read-only", access_key="ckptmgr-reader", secret_key="ckptmgr-reader-secret", may_write=False)
DEFAULT_IDENTITIES = (ADMIN, NO_LIST, READ_ONLY)
