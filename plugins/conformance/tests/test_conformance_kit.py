"""The conformance kit, against our broker and against others, so that we know that it is right.

Each run is the command of the guide, in an empty folder. What other hosts do is in two tables, with the
reason for each departure: whoever changes a check sees here whether it still tells right from wrong.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import foreign_brokers
import pytest
from _pytest.outcomes import OutcomeException
from amqp_rt_conformance import deliveries, nodes, opening, sessions
from amqp_rt_conformance.checks import TITLES, Check
from certificates import certificates

from amqp_rt import Limits, ServerTls
from amqp_rt.testing import LoopbackBroker

REQUIREMENTS = Path(__file__).parents[3] / "tests" / "requirements.toml"
CHECKS = [
    each
    for module in (opening, sessions, deliveries, nodes)
    for each in vars(module).values()
    if isinstance(each, Check)
]

#: Host → why it departs → in which checks.
DEPARTURES: dict[str, dict[str, str]] = {
    "proton-c": {
        "proton never answers an echo": "echo_of_a_session echo_of_a_link",
        "proton reads what types it finds, and takes what it cannot read for null": """
            open_without_a_container_id field_of_a_wrong_type mandatory_field_missing""",
        "proton does not look into maps that nobody asks for": "half_a_pair same_key_twice",
        "proton does not look whether strings are UTF-8": "text_that_is_no_utf8",
        "proton knows no symbolic descriptors": "symbolic_descriptors",
        "after octets that it cannot decode proton waits, and does not close": """
            unknown_performative frame_without_a_performative sizes_that_lie count_that_lies""",
        "proton takes open, begin and attach in any state": """
            begin_before_open open_twice channel_in_use handle_in_use""",
        "proton closes the connection with invalid-field where a handle is unknown": """
            flow_without_a_link transfer_without_a_link detach_without_a_link
            session_error_ends_no_connection""",
        "proton makes up a delivery-tag that is missing": "no_delivery_tag",
        "the broker never calls pn_link_drained": "drain_of_nothing drain_of_what_is_there",
        "links are not looked up by name across connections": "stolen",
        "the broker does not handle PN_LINK_REMOTE_DETACH": "suspended",
        "the broker does not look at max-message-size": "our_max_message_size",
        "a message that has been sent is forgotten, whatever becomes of it": """
            outcomes_in_any_order released modified_failed modified_annotations link_closed_unsettled
            connection_cut_unsettled""",
        "the broker does not look at headers": "time_to_live",
        "pieces of a message are all written to the beginning of its buffer": "large_message",
    },
    "rabbitmq": {
        "it ends the stream, and says nothing, where it cannot log somebody in": "unknown_mechanism",
        "it ends the stream, and says nothing, where a frame has a wrong header": """
            data_offset_too_small data_offset_beyond_the_frame frame_smaller_than_its_header""",
        "what is before open, or cannot be read there, is left unanswered": """
            open_without_a_container_id begin_before_open field_of_a_wrong_type text_that_is_no_utf8
            sizes_that_lie count_that_lies half_a_pair same_key_twice""",
        "a second open is answered by close without an error": "open_twice",
        "what comes for a session goes to its process unseen": """
            frame_without_a_performative frame_on_a_channel_without_a_session channel_in_use
            mandatory_field_missing""",
        "handles are not looked up: the conditions are others, or none": """
            handle_in_use flow_without_a_link transfer_without_a_link detach_without_a_link""",
        "detach is answered without closed": "handle_again",
        "a refused attach ends the session": "refused",
        "links are not looked up by name across connections": "stolen",
        "an echo is not answered": "echo_of_a_session echo_of_a_link",
        "drain crashes the session (send_drained in rabbit_classic_queue)": """
            drain_of_nothing drain_of_what_is_there""",
        "the first transfer of a delivery and the others are not told apart by what they carry": """
            transfers_that_repeat_themselves another_id_within_a_delivery no_delivery_tag""",
        "aborted is not known": "aborted",
        "a delivery is settled by its first transfer or not at all": "settled_by_the_last_transfer",
        "max-message-size is not looked at": "our_max_message_size",
        "modified and received are not known": """
            modified_failed modified_undeliverable_here modified_annotations received""",
        "what is unsettled comes back when the session ends, not the link": "link_closed_unsettled",
        "data sections come in the reverse order": "kinds_of_body",
        "messages become those of 0-9-1 and get a section of properties": "nothing_is_added",
        "source and target are answered as they were asked for": """
            copies unknown_distribution_mode unknown_filter selector capabilities""",
    },
}
#: Host → why the verdict depends on how octets arrive → in which checks.
SOMETIMES: dict[str, dict[str, str]] = {
    "proton-c": {
        "pieces of a message that come at once need not be put together": """
            several_transfers transfers_that_repeat_themselves interleaved_deliveries smallest_frames
            settled_by_the_last_transfer""",
    },
    "rabbitmq": {
        "credit that comes while messages are under way is added": "credit_is_no_sum",
        "of deliveries on two links at once one may go unanswered": "interleaved_deliveries",
        "a session that ends as it begins is ended by two processes": "begin_and_end_at_once",
    },
}
#: Host → what it does not have.
NOT_OFFERED: dict[str, str] = {
    "proton-c": """
        wrong_password frame_too_large idle_time_out_of_theirs their_handle_max refused resumed
        resumed_by_us acquired_in_a_transaction only_connection their_max_message_size settled_by_the_host unsettled_by_the_host
        receiver_settles_second host_settles_second copies selector dynamic_source two_dynamic_sources
        dynamic_target delete_on_close anonymous_relay coordinator declare unknown_transaction
        sent_in_a_transaction sent_and_rolled_back accepted_in_a_transaction accepted_and_rolled_back
        coordinator_closed""",
    "rabbitmq": """
        wrong_password frame_too_large idle_time_out_of_theirs their_channel_max their_handle_max resumed
        resumed_by_us acquired_in_a_transaction only_connection their_max_message_size receiver_settles_second host_settles_second dynamic_source
        two_dynamic_sources dynamic_target delete_on_close anonymous_relay coordinator declare
        unknown_transaction sent_in_a_transaction sent_and_rolled_back accepted_in_a_transaction
        accepted_and_rolled_back coordinator_closed""",
}
#: Where checks have their queues; each of its own, so that what one leaves does not meet the next.
OWN_QUEUES = "amqp-rt-conformance-{}"


def kit(folder: Path, *arguments: str, plugins: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the kit from an empty folder; *plugins*: with all others that are installed, as users do."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "amqp_rt_conformance", *arguments],
        cwd=empty,
        env={**os.environ, **({} if plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})},
        capture_output=True,
        text=True,
        check=False,
    )


def verdicts(report: Path) -> dict[str, str]:
    """Check → verdict."""
    return {each["check"]: each["verdict"] for each in json.loads(report.read_text())["checks"]}


# --- ours ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("A21", *TITLES)
def test_our_broker_keeps_to_the_standard(tmp_path: Path) -> None:
    with LoopbackBroker(
        auto_create=["queue:amqp-rt-conformance-*"],
        users={"kit": "secret"},
        # Small enough to be tried.
        limits=Limits(idle_timeout_s=2, message_size_max=300_000),
    ) as broker:
        url = broker.url.replace("//", "//kit:secret@")
        report = tmp_path / "report.json"
        run = kit(tmp_path, "--amqp-url", url, "--amqp-address", OWN_QUEUES, f"--amqp-report={report}", plugins=True)  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert verdicts(report) == dict.fromkeys([each.name for each in CHECKS], "passed")
    assert f"{len(CHECKS)} passed, 0 depart from the standard, 0 not offered" in run.stdout
    assert "secret" not in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dynamic_nodes_will_do(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with LoopbackBroker() as broker:
        run = kit(tmp_path, "--amqp-url", broker.url, f"--amqp-report={report}", "-k", "released or stolen or our_window")  # fmt: skip
    assert "checked with dynamic nodes" in run.stdout
    # A dynamic node of ours is read by its own connection only.
    assert verdicts(report) == {"released": "passed", "stolen": "passed", "our_window": "not offered"}  # fmt: skip
    assert "only the connection that made a dynamic node may receive" in run.stdout


@pytest.mark.slow
def test_one_queue_will_do(tmp_path: Path) -> None:
    with LoopbackBroker() as broker:
        work = broker.declare("work")
        work.send("left from before")
        run = kit(tmp_path, "--amqp-url", broker.url, "--amqp-address", "work", "-m", "M22 or X16")
    assert run.returncode == 0, run.stdout
    assert "3 passed, 0 depart from the standard, 0 not offered" in run.stdout


@pytest.mark.slow
def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = certificates()
    with LoopbackBroker(tls=ServerTls(known.server)) as broker:
        broker.declare("work")
        (url,) = broker.call(broker.broker.listen, "amqps://localhost:0")
        untrusted = kit(tmp_path, "--amqp-url", url, "--amqp-address=work", "-k", "large_message")
        assert untrusted.returncode == pytest.ExitCode.USAGE_ERROR
        assert "SSL_CERT_FILE names the authorities to trust" in untrusted.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(known.ca))
        run = kit(
            tmp_path, "--amqp-url", url, "--amqp-address=work", "-k", "large_message or stolen"
        )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed, 0 depart from the standard" in run.stdout


# --- others --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """The kit's runs against other brokers, side by side: most of their time is waiting."""
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(run_against, name, tmp_path_factory.mktemp(name))
            for name in DEPARTURES
        }


def run_against(name: str, folder: Path) -> tuple[dict[str, str], str] | OutcomeException:
    report = folder / "report.json"
    with ExitStack() as stack:
        try:
            broker = stack.enter_context(foreign_brokers.foreign_broker(name))
        except OutcomeException as absent:
            return absent
        url, address = f"amqp://127.0.0.1:{broker.port}", broker.address(OWN_QUEUES)
        where = f"--amqp-url={url}", f"--amqp-address={address}", f"--amqp-report={report}"
        run = kit(folder, *where, "--amqp-timeout=2")
        assert report.exists(), run.stdout + run.stderr
        found, text = verdicts(report), run.stdout
        wanted = expected_of(name)
        late = [each for each in found if (found[each], wanted[each]) == ("departs", "passed")]
        if late:
            # On a busy machine two seconds may be too few for an answer; waiting longer for each
            # answer that never comes would take minutes.
            again = kit(folder, *where, "--amqp-timeout=15", "-k", " or ".join(late))
            found |= {each: verdict for each, verdict in verdicts(report).items() if each in late}
            text += again.stdout
    return found, text


def expected_of(name: str) -> dict[str, str]:
    """Check → verdict that is known of the broker *name*."""
    expected = {each.name: "passed" for each in CHECKS}
    expected |= dict.fromkeys(" ".join(DEPARTURES[name].values()).split(), "departs")
    return expected | dict.fromkeys(NOT_OFFERED[name].split(), "not offered")


@pytest.mark.foreign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEPARTURES)
def test_other_brokers_depart_where_we_know(name: str, runs: dict[str, Future[Any]]) -> None:
    found = runs[name].result()
    if isinstance(found, OutcomeException):
        raise found
    seen, text = found
    sometimes = set(" ".join(SOMETIMES[name].values()).split())
    expected = expected_of(name)
    other = {
        check: f"{verdict}, expected {expected[check]}"
        for check, verdict in seen.items()
        if verdict != expected[check] and check not in sometimes
    }
    assert not other, text
    assert seen.keys() == expected.keys()
    assert all(seen[check] in ("passed", "departs") for check in sometimes)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail), ("", pytest.skip)])
def test_a_broker_that_is_not_here(ci: str, outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_brokers.benchmarks()
    from benchmarks.contestants import PEERS

    monkeypatch.setitem(PEERS, "rabbitmq", lambda: "rabbitmq-server is not installed")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome.Exception, match="rabbitmq-server is not installed"):
        foreign_brokers.foreign_broker("rabbitmq")


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_stands_in_the_way_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for arguments, says in [
        ([], "no host to check: pass --amqp-url amqp://HOST:PORT"),
        (["--amqp-url", "localhost:5672"], "is not the URL of an AMQP host"),
        (["--amqp-url", "amqp://localhost:many"], "has a port that is none"),
        (["--amqp-url", f"amqp://127.0.0.1:{port}"], f"no connection to 127.0.0.1:{port}: Connection refused. Does"),
    ]:  # fmt: skip
        run = kit(tmp_path, *arguments)
        assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout
        assert says in run.stderr
        assert "Traceback" not in run.stderr + run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "arguments", "says"),
    [
        ({"users": {"a": "b"}}, [], "pass --amqp-user and --amqp-password"),
        ({"users": {"a": "b"}}, ["--amqp-user=a"], "does not let the user 'a' in (SASL code 1)"),
        ({}, ["--amqp-address=nowhere"], "has no queue 'nowhere' for us: amqp:not-found"),
    ],
)
def test_not_let_in(
    options: dict[str, Any], arguments: list[str], says: str, tmp_path: Path
) -> None:
    with LoopbackBroker(**options) as broker:
        run = kit(tmp_path, "--amqp-url", broker.url, *arguments)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout
    assert says in run.stderr


@pytest.mark.slow
def test_a_host_that_is_not_of_amqp(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://127.0.0.1:{silent.getsockname()[1]}"
        run = kit(tmp_path, "--amqp-url", url, "--amqp-timeout", "0.2")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "does not get as far as to a session" in run.stderr
    assert "header is expected, and nothing arrives in 0.2 s" in run.stderr


@pytest.mark.slow
def test_other_tests_are_left_out_unless_they_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "test_of_mine.py").write_text("def test_mine(): pass\n")
    alone = kit(tmp_path, "--collect-only", "-q")
    assert "test_mine" not in alone.stdout
    assert f"{len(CHECKS)} tests collected" in alone.stdout
    assert "amqp::stolen" in alone.stdout
    both = kit(tmp_path, "--collect-only", "-q", "test_of_mine.py")
    assert f"{len(CHECKS) + 1} tests collected" in both.stdout


@pytest.mark.slow
def test_a_departure_is_shown_with_its_section(tmp_path: Path) -> None:
    """Our broker as one that takes anybody's word: what it does not do shows in every form."""
    report = tmp_path / "report.json"
    with LoopbackBroker(limits=Limits(frame_size_before_open=100)) as broker:
        broker.declare("work")
        run = kit(
            tmp_path, "--amqp-url", broker.url, "--amqp-address=work", "-k", "several_values or stolen",
            f"--amqp-report={report}", "-v",
        )  # fmt: skip
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert verdicts(report) == {"several_values": "departs", "stolen": "passed"}
    assert re.search(r"^T8 .* · +1 +·$", run.stdout, re.MULTILINE), run.stdout
    assert "T8  §1.4  Of a field with several values one may come by itself" in run.stdout
    assert "1 passed, 1 depart from the standard, 0 not offered" in run.stdout


# --- the list ------------------------------------------------------------------------------------


def test_every_check_has_its_requirements() -> None:
    with REQUIREMENTS.open("rb") as file:
        known = {name for section in tomllib.load(file).values() for name in section}
    assert set(TITLES) <= known
    assert {name for each in CHECKS for name in each.ids} == set(TITLES)
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    for each in CHECKS:
        assert re.fullmatch(r"[1-5]\.\d+(\.\d+)*", each.section), each.name
        assert each.promise, each.name
        assert not each.promise.endswith(".")


def test_the_tables_name_checks_once() -> None:
    names = {each.name for each in CHECKS}
    for host, reasons in DEPARTURES.items():
        told = " ".join([*reasons.values(), *SOMETIMES[host].values(), NOT_OFFERED[host]]).split()
        assert set(told) <= names, set(told) - names
        assert len(set(told)) == len(told), host
