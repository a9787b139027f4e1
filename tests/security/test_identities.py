"""Where passwords come from, how they are kept, and that nothing shows them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from disks import Renames

from amqp_rt.security.identities import (
    IdentityError,
    Users,
    check_password,
    hash_password,
    parse_user,
    password_line,
    rewrite,
)


@pytest.mark.req("SE2")
def test_a_hash_lets_its_password_in_and_no_other() -> None:
    hashed = hash_password("s3cret")
    assert "s3cret" not in hashed
    assert check_password("s3cret", hashed)
    assert not check_password("s3cret ", hashed)
    assert hash_password("s3cret") != hashed


@pytest.mark.req("SE2")
def test_users_that_the_program_names() -> None:
    users = Users({"bob": "s3cret", "eve": "p:w"})
    assert users.check("bob", "s3cret") == "bob"
    assert users.check("eve", "p:w") == "eve"
    assert users.check("bob", "p:w") is None
    assert users.check("nobody", "s3cret") is None
    assert users.check("nobody", "") is None
    assert ("bob" in users, "nobody" in users, len(users)) == (True, False, 2)


@pytest.mark.req("SE2")
def test_users_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text(f"# who may come\n\n{password_line('bob', 's3cret')}\n", "utf-8")
    users = Users({"eve": "pw"})
    users.load(path)
    assert users.check("bob", "s3cret") == "bob"
    assert users.check("eve", "pw") == "eve"
    assert users.check("bob", "pw") is None
    assert users.check("nobody", "s3cret") is None
    assert "s3cret" not in path.read_text("utf-8")


def test_the_latest_password_counts(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text(password_line("bob", "from file"), "utf-8")
    users = Users({"bob": "first"})
    users.add("bob", "second")
    assert (users.check("bob", "first"), users.check("bob", "second")) == (None, "bob")
    users.load(path)
    assert (users.check("bob", "second"), users.check("bob", "from file")) == (None, "bob")
    users.add("bob", "third")
    assert (users.check("bob", "from file"), users.check("bob", "third")) == (None, "bob")
    assert len(users) == 1


def test_no_user_is_known_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known or not, in the file or not: each costs one slow check. Counted, not timed."""
    path = tmp_path / "users"
    path.write_text(password_line("bob", "s3cret"), "utf-8")
    users = Users({"eve": "pw"})
    users.load(path)
    slow: list[str] = []
    real = check_password

    def counting(password: str, hashed: str) -> bool:
        slow.append(password)
        return real(password, hashed)

    monkeypatch.setattr("amqp_rt.security.identities.check_password", counting)
    for user, password in [("bob", "s3cret"), ("bob", "x"), ("eve", "pw"), ("nobody", "x")]:
        slow.clear()
        users.check(user, password)
        assert len(slow) == 1


def test_nothing_shows_a_password() -> None:
    users = Users({"bob": "s3cret"})
    assert "s3cret" not in repr(users) + repr(vars(users))


@pytest.mark.parametrize(
    "line",
    [
        "bob",
        "bob:",
        "bob:s3cret",
        ":scrypt$AAAA$AAAA",
        "bob:scrypt$AAAA",
        "bob:scrypt$AAAA$AAAA",
        "bob:scrypt$!!!!$AAAA",
        "bob:bcrypt$AAAA$AAAA",
        "bob:scrypt$$" + "A" * 88,
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "users"
    path.write_text(f"{password_line('eve', 'pw')}\n\n{line}\n", "utf-8")
    users = Users()
    with pytest.raises(
        IdentityError, match=r"users, line 3: expected NAME:scrypt\$SALT\$KEY"
    ) as it:
        users.load(path)
    assert "s3cret" not in str(it.value)
    assert len(users) == 0


def test_a_user_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "users"
    line = password_line("eve", "pw")
    path.write_text(f"{line}\n{line}\n", "utf-8")
    with pytest.raises(IdentityError, match="line 2: 'eve' is there twice"):
        Users().load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"cannot read users from .*missing: No such file"):
        Users().load(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(IdentityError, match=r"binary: it is not UTF-8"):
        Users().load(tmp_path / "binary")


@pytest.mark.parametrize(
    ("user", "password"),
    [
        *(
            (name, "p")
            for name in ("", "a:b", "a\0", "a\n", "#a", " a", "a\rb", "a\x0bb", "a\u2028b")
        ),
        ("a", ""),
        ("a", "\0"),
    ],
)
def test_what_cannot_be_a_user_is_refused(user: str, password: str) -> None:
    for add in (Users().add, password_line):
        with pytest.raises(IdentityError):
            add(user, password)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bob:pw", ("bob", "pw")),
        ("bob:p:w", ("bob", "p:w")),
        ("bob:pw@host", ("bob", "pw@host")),
        ("bob", ("bob", "from environment")),
        ("Bob-2", ("Bob-2", "other")),
    ],
)
def test_a_user_on_the_command_line(text: str, expected: tuple[str, str]) -> None:
    environ = {"AMQP_RT_PASSWORD_BOB": "from environment", "AMQP_RT_PASSWORD_BOB_2": "other"}
    assert parse_user(text, environ=environ) == expected


def test_a_password_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("pw with space \r\nsecond line\n", "utf-8")
    assert parse_user(f"bob:@{path}") == ("bob", "pw with space ")


def test_a_password_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("pw\nnext\n"))
    assert parse_user("bob:-") == ("bob", "pw")
    assert parse_user("eve:-") == ("eve", "next")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the name is empty"),
        (":pw", "the name is empty"),
        ("bob", "set AMQP_RT_PASSWORD_BOB, or use bob:@FILE"),
        ("bob:", "the password of 'bob' is empty"),
        ("bob:@missing-file", "cannot read the password of 'bob' from missing-file"),
    ],
)
def test_a_user_without_password_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(IdentityError) as it:
        parse_user(text, environ={})
    assert why in str(it.value)


def test_an_empty_file_has_no_password(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(IdentityError, match="empty"):
        parse_user(f"bob:@{tmp_path / 'empty'}")


# --- changed while they are in use ------------------------------------------------------------------


def loaded(path: Path) -> Users:
    users = Users()
    users.load(path)
    return users


@pytest.mark.slow
@pytest.mark.req("SE2", "SE3")
def test_changes_go_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "users"
    lines = ["# who may come", "", *(password_line(each, "pw", scram=["SHA-256"]) for each in "ab")]
    path.write_text("\n".join(lines), "utf-8")
    users = Users({"eve": "pw"})
    users.load(path)
    users.store("a", "newer")
    users.store("c", "third")
    users.store("eve", "in memory")
    users.forget("b")
    users.forget("eve")
    users.forget("nobody")
    kept = path.read_text("utf-8")
    assert kept.startswith("# who may come\n\na:scrypt$")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert not {"pw", "newer", "third", "in memory", "eve"} & set(kept.replace(":", " ").split())
    for each in (users, loaded(path)):
        assert list(each) == ["a", "c"]
        assert (each.check("a", "pw"), each.check("a", "newer")) == (None, "a")
        assert each.check("c", "third") == "c"
        # All users have a hash for each mechanism of the others.
        assert each.scram_hashes == ("SHA-256",)
        for name in ("b", "eve"):
            assert each.check(name, "pw") is None
            assert each.scram(name, "SHA-256") is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot synchronize folders")
def test_a_change_of_the_file_outlives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a user who was removed could be back."""
    path = tmp_path / "users"
    renames = Renames(monkeypatch)
    rewrite(path, "eve", password_line("eve", "secret"), create=True)
    assert renames.names == ["users"]
    assert not renames.unsafe
    rewrite(path, "eve", None)
    assert renames.names == ["users", "users"]
    assert not renames.unsafe


def test_a_user_who_is_removed_is_gone_for_every_mechanism() -> None:
    users = Users({"ada": "pw"})
    assert users.scram("ada", "SHA-256") is not None
    users.remove("ada")
    assert users.scram("ada", "SHA-256") is None


def test_without_a_file_changes_are_in_memory() -> None:
    users = Users({"ada": "pw"})
    users.store("ada", "newer")
    users.store("bob", "pw")
    assert (users.check("ada", "newer"), users.check("bob", "pw")) == ("ada", "bob")


def test_a_file_that_cannot_be_written_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "users"
    path.parent.mkdir()
    path.write_text(password_line("a", "pw"), "utf-8")
    users = loaded(path)
    path.unlink()
    # The others are not to be lost with it.
    with pytest.raises(IdentityError, match=r"cannot read users from .*users: No such file"):
        users.store("a", "newer")
    with pytest.raises(IdentityError, match="cannot read users"):
        users.forget("a")
    path.mkdir()
    with pytest.raises(IdentityError, match="Is a directory"):
        users.store("a", "newer")
    assert users.check("a", "pw") == "a"
    with pytest.raises(IdentityError, match="empty"):
        users.store("a", "")


def test_a_password_that_was_right_needs_no_second_check(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text(password_line("ada", "pw") + "\n")
    users = loaded(path)
    users.add("given", "in clear")
    assert not users.recall("ada", "pw")
    assert users.check("ada", "wrong") is None
    assert not users.recall("ada", "wrong")
    assert users.check("ada", "pw") == "ada"
    assert users.recall("ada", "pw")
    assert not users.recall("ada", "wrong")
    assert not users.recall("bob", "pw")
    assert not users.recall("nobody", "")
    assert users.recall("given", "in clear")
    assert not users.recall("given", "pw")
    # A changed entry is checked again.
    users.store("ada", "other")
    assert not users.recall("ada", "pw")
    assert users.check("ada", "other") == "ada"
    assert users.recall("ada", "other")
    users.forget("ada")
    assert not users.recall("ada", "other")
