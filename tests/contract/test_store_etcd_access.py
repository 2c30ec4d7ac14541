"""The etcd store where etcd asks who one is: TLS with certificates, users with passwords."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd3 import etcdrpc

from narwhal.clock import RealClock
from narwhal.control.store.base import LeaseLost, StoreError
from narwhal.control.store.etcd import EtcdStore
from tests.contract.etcd_kit import led, opened, settings, until
from tests.etcd import Certificates, Etcd

# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("secure"), tls=certificates) as etcd:
        yield etcd


def shown(certificates: Certificates) -> dict[str, str]:
    return {"ca": str(certificates.ca), "cert": str(certificates.cert), "key": str(certificates.key)}


async def test_over_tls_with_a_certificate_of_its_own(secure: Etcd, certificates: Certificates) -> None:
    assert secure.endpoints[0].startswith("https://")
    async with opened(secure, ttl_s=2, **shown(certificates)) as make:
        store = await make()
        lease = await led(store)
        await store.save(lease, b"document")
        await store.changed(60)
        deadline = lease.valid_until
        await until(lambda: lease.valid_until > deadline, "renewals go on")


@pytest.mark.parametrize("lacking", ["certificate", "CA"])
async def test_without_the_right_certificates_it_fails_in_time(
    lacking: str, secure: Etcd, certificates: Certificates, tmp_path: Path
) -> None:
    files = shown(certificates)
    if lacking == "CA":
        files["ca"] = str(Certificates.make(tmp_path).ca)
    else:
        del files["cert"], files["key"]
    async with opened(secure, ttl_s=2, **files) as make:
        store = await make()
        with pytest.raises(StoreError, match=r"etcd at https://127\.0\.0\.1"):
            await store.load()


async def test_renewed_certificates_need_no_restart(secure: Etcd, certificates: Certificates, tmp_path: Path) -> None:
    replaced = Certificates(ca=tmp_path / "ca.pem", cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    wrong = Certificates.make(tmp_path / "wrong")
    for name in ("ca", "cert", "key"):
        getattr(replaced, name).write_bytes(getattr(wrong, name).read_bytes())
    async with opened(secure, ttl_s=2, **shown(replaced)) as make:
        store = await make()
        with pytest.raises(StoreError):
            await store.load()
        for name in ("ca", "cert", "key"):
            getattr(replaced, name).write_bytes(getattr(certificates, name).read_bytes())
        assert await store.load() is None


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
async def test_a_file_that_cannot_be_read_stops_the_start(
    name: str, secure: Etcd, certificates: Certificates, tmp_path: Path
) -> None:
    chosen = settings(secure, **{**shown(certificates), name: str(tmp_path / "nothing.pem")})
    with pytest.raises(StoreError, match=f"cannot read {tmp_path}/nothing.pem: No such file"):
        await EtcdStore.open(chosen, RealClock(), warn=print)


# --- users ------------------------------------------------------------------------------------------------------------

ROOT_PASSWORD = "of root"
LOGIN = {"username": "narwhal", "password": "correct"}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd whose user `narwhal` may read and write below /narwhal/ and nothing else."""
    # A password is made hard to check, for the machine that checks it, too: the least of it that etcd allows.
    with Etcd(tmp_path, flags=["--bcrypt-cost", "4"]) as etcd:
        with etcd.client() as client:
            auth = client.authstub
            for user, password in (("root", ROOT_PASSWORD), (LOGIN["username"], LOGIN["password"])):
                auth.UserAdd(etcdrpc.AuthUserAddRequest(name=user, password=password))
                auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name=user))
                auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=user))
            grant: Any = etcdrpc.AuthRoleGrantPermissionRequest(name=LOGIN["username"])
            grant.perm.permType = grant.perm.READWRITE
            grant.perm.key, grant.perm.range_end = b"/narwhal/", b"/narwhal0"
            auth.RoleGrantPermission(grant)
            auth.AuthEnable(etcdrpc.AuthEnableRequest())
        yield etcd


async def test_a_user_with_a_role_below_the_prefix_can_do_everything(guarded: Etcd) -> None:
    warned: list[str] = []
    async with opened(guarded, **LOGIN) as make:
        active, standby = await make(warn=warned.append), await make()
        lease = await led(active)
        await active.save(lease, b"document")
        await active.set_aside(lease, b"old")
        await standby.changed(60)
        assert await standby.load() == b"document"
        assert await standby.acquire("b", "h:2") is None
        await active.release(lease)
        assert (await led(standby, "b")).epoch == 2


async def test_tokens_that_a_restart_of_etcd_forgets_are_asked_for_again(guarded: Etcd) -> None:
    async with opened(guarded, **LOGIN) as make:
        active, standby = await make(), await make()
        lease = await led(active)
        await active.save(lease, b"before")
        await asyncio.to_thread(guarded.kill)
        await asyncio.to_thread(guarded.start)
        await active.save(lease, b"after")
        assert await standby.load() == b"after"
        assert not lease.lost


async def test_a_token_that_has_run_out_is_asked_for_again(guarded: Etcd) -> None:
    async with opened(guarded, **LOGIN) as make:
        store = await make()
        lease = await led(store)
        store._connection._connected().metadata = (("token", "run.out"),)
        await store.save(lease, b"document")
        assert await store.load() == b"document"


async def test_a_change_of_users_while_it_runs_is_no_failure(guarded: Etcd) -> None:
    async with opened(guarded, **LOGIN) as make:
        store = await make()
        lease = await led(store)
        with guarded.client(user="root", password=ROOT_PASSWORD) as client:
            client.authstub.UserAdd(
                etcdrpc.AuthUserAddRequest(name="another", password="x"), 10, metadata=client.metadata
            )
        await store.save(lease, b"document")
        assert await store.load() == b"document"


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ({**LOGIN, "password": "wrong"}, "authentication failed, invalid user ID or password"),
        ({}, "user name is empty"),
        ({**LOGIN, "prefix": "/elsewhere"}, "permission denied"),
    ],
    ids=["wrong password", "no user", "not its keys"],
)
async def test_who_is_refused_is_told_why_at_once(login: dict[str, str], words: str, guarded: Etcd) -> None:
    async with opened(guarded, **login) as make:
        store = await make()
        for call in (store.load(), store.acquire("a", "h:1")):
            with pytest.raises(StoreError, match=words) as caught:
                await call
            assert not isinstance(caught.value, LeaseLost)


def test_a_password_is_not_in_words(secure: Etcd) -> None:
    assert "correct" not in repr(settings(secure, **LOGIN))
