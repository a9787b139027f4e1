"""How jobs are declared, told and sent to a cluster: without Spark."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.jobs import cli, launching
from amqp_rt_spark.jobs.checkpoints import local_path, read_checkpoint
from amqp_rt_spark.jobs.conf import JOBS, Duration, JobConf, Rate, StreamConf, per_second
from amqp_rt_spark.jobs.ingest import Ingest
from amqp_rt_spark.jobs.lag import Lag, Settle, lag, settle
from amqp_rt_spark.jobs.launching import sentence_of, signals
from amqp_rt_spark.jobs.running import places_of
from amqp_rt_spark.jobs.submitting import package
from amqp_rt_spark.leasing import lease_offset
from amqp_rt_spark.offsets import offset_of
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

pytestmark = pytest.mark.req("K7")


class Example(StreamConf, frozen=True, kw_only=True):
    """A conf with a field of each kind."""

    address: Annotated[tuple[str, ...], Meta(description="Some.")]
    rate: Annotated[Rate | None, Meta(description="How fast.")] = None
    wait: Annotated[Duration, Meta(description="How long.")] = ""
    least: Annotated[int, Meta(description="How many.", ge=1)] = 3


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.pipeline, words, env={"AMQP_URL": None})


# --- what a job is told --------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("200/s", 200), ("60/m", 1), ("1.5 / s", 1.5)])
def test_rates(text: str, value: float) -> None:
    assert per_second(text) == value


@pytest.mark.parametrize("text", ["", "200", "0/s", "-1/s", "1/y", "/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate such as"):
        per_second(text)


def test_a_conf_made_in_a_notebook_is_checked() -> None:
    assert Example(address=["a", "b"]).address == ("a", "b")
    assert Example(address="a").address == ("a",)
    assert Example(address="a", every="5m").trigger == {"processingTime": "300000 milliseconds"}
    assert Example(address="a", once=True).trigger == {"availableNow": True}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": "soon"}, "every: 'soon' is not a time such as 30s, 500ms, 5m or 2h"),
        ({"rate": "5"}, "rate: '5' is not a rate such as 200/s or 1000/m"),
        ({"least": 0}, "least is 0: expected `int` >= 1"),
        ({"least": "7"}, "least is '7': expected `int`, got `str`"),
        ({"url": "amqp://u:secret@h"}, "url holds a user or a password, which Spark would show"),
        ({"url": "kafka://h"}, "url: kafka://h: there is no such scheme"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Example(address="a", **wrong)
    assert "secret" not in str(error.value)


def test_the_options_of_the_source_are_text() -> None:
    conf = Example(address=["a", "b"], tls_ca="ca.pem", credentials_env="SECRET")
    assert conf.options(address=conf.address, raw=True, group="", maxBytesPerTrigger=None) == {
        "url": "amqp://127.0.0.1:5672",
        "credentialsEnv": "SECRET",
        "tls.ca": "ca.pem",
        "address": "a,b",
        "raw": "true",
    }


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_each_job_is_a_command_with_all_its_options(job: Any) -> None:
    pytest.importorskip("pyspark")
    function, conf = job.load()
    assert function.__doc__
    assert issubclass(conf, JobConf)
    ours, running = cli.fields_of(conf), cli.fields_of(cli.Running)
    assert not ours.keys() & running.keys()
    found = run(job.name, "--help")
    assert found.exit_code == 0, found.output
    for name in (*ours, *running):
        assert f"--{name.replace('_', '-')} " in found.output


def told(*words: str) -> tuple[Any, Any]:
    """What *words* tell ingest."""
    (job,) = (job for job in JOBS if job.name == "ingest")
    with cli.command_of(job).make_context("ingest", list(words)) as context:
        config = context.params.pop("config")
        return cli.read_told(Ingest, config, context.params)


#: Texts that may stand on a command line.
_TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)


@pytest.mark.slow
@given(
    st.builds(
        dict,
        address=st.lists(_TEXTS, min_size=1, max_size=3),
        table=_TEXTS,
        table_format=st.sampled_from(["auto", "delta", "parquet"]),
        partition_by=st.lists(st.sampled_from(["date", "address"]), min_size=1, max_size=2),
        every=st.sampled_from(["1s", "5m"]),
        once=st.booleans(),
        raw=st.booleans(),
        group=_TEXTS,
        max_messages=st.integers(1, 1 << 62),
        selector=_TEXTS,
    )
)
def test_what_is_told_is_told_again_by_the_words_of_a_line(fields: dict[str, Any]) -> None:
    conf = Ingest(**fields)
    assert told(*cli.arguments_of(conf))[0] == conf


def test_a_file_tells_what_the_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'address = ["a", "b"]\ntable = "lake/t"\nonce = true\nmaster = "local[2,2]"\nmax_messages = 5\n'
    )
    conf, running = told("--config", str(file), "--max-messages=7", "--no-once", "--format=json")
    assert (conf.address, conf.table, conf.max_messages, conf.once) == (
        ("a", "b"),
        "lake/t",
        7,
        False,
    )
    assert (running.master, running.format) == ("local[2,2]", "json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'adress = ["a"]\n',
            "job.toml, line 1: there is no 'adress' here; did you mean 'address'?",
        ),
        ('\nmax_messages = "5"\n', "job.toml, line 2: expected `int"),
        ("address = [\n", "job.toml, line"),
        ('address = ["a"]\n', "--table is missing"),
        ('address = ["a"]\ntable = "t"\nevery = "x"\n', "--every: 'x' is not a time"),
        ('address = ["a"]\ntable = "t"\nurl = "amqp://u:p@h"\n', "url holds a user or a password"),
    ],
)
def test_a_mistake_in_the_file_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(text)
    found = run("ingest", "--config", "job.toml")
    assert found.exit_code == 2
    assert said in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inges"], "; did you mean 'ingest'?"),
        (["ingest", "--tabel", "x"], "--table"),
        (["ingest", "--address", "a"], "--table is missing"),
        (["ingest", "--body", "xml"], "'xml' is not one of"),
        (["lag", "--checkpoint=nowhere", "--format=json"], "nowhere is no checkpoint"),
        (
            ["ingest", "--address=a", "--table=t", "--format=json", "--conf=x"],
            "--conf 'x' is not NAME=VALUE",
        ),
        (["submit", "--print", "inges"], "there is no job 'inges'; did you mean 'ingest'?"),
        (["submit", "--print", "ingest", "--address", "a"], "--table is missing"),
    ],
)
def test_a_mistake_on_the_line_is_a_sentence(words: list[str], said: str) -> None:
    found = run(*words)
    assert found.exit_code in (1, 2)
    assert said in found.output
    assert "Traceback" not in found.output


# --- to a cluster --------------------------------------------------------------------------------


def test_the_line_for_a_cluster(tmp_path: Path) -> None:
    archive, file = tmp_path / "jobs.zip", tmp_path / "job.toml"
    file.write_text('address = ["orders"]\ntable = "s3://lake/or ders"\n')
    words = ["submit", "--print", "--package", str(archive), "ingest", "--config", str(file)]
    found = run(*words, "--master=yarn", "--conf=spark.executor.instances=2", "--format=json")
    assert found.exit_code == 0, found.output
    application = Path(cli.__file__).with_name("submitted.py")
    assert found.output == (
        "spark-submit --master yarn --name 'amqp-rt ingest' --conf spark.executor.instances=2 "
        f"--conf spark.executorEnv.PYTHONPATH={archive}:jobs.zip "
        f"--py-files {archive} {application} ingest --address=orders '--table=s3://lake/or ders' "
        "--format=json\n"
    )
    assert archive.is_file()


@pytest.mark.slow
def test_the_archive_is_all_that_a_machine_lacks(tmp_path: Path) -> None:
    """It runs where neither the runtime nor the plug-in is, and says what a job takes."""
    pytest.importorskip("pyarrow")
    archive, again = tmp_path / "jobs.zip", tmp_path / "again.zip"
    package(str(archive))
    package(str(again))
    assert archive.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(archive) as packed:
        names = packed.namelist()
    assert "amqp_rt_spark/jobs/report.html.jinja" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".pyc"))]
    program = (
        "import sys; sys.path[:] = [each for each in sys.path if 'site-packages' not in each];"
        f"sys.path[:0] = [{str(archive)!r}, {os.path.dirname(os.path.dirname(cli.msgspec.__file__))!r}];"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'ditable' not in repr(each)];"
        "import amqp_rt, amqp_rt_spark.source; print(amqp_rt.__file__, amqp_rt_spark.__file__);"
        "assert 'trio' not in sys.modules;"
        "from amqp_rt_spark.jobs.cli import pipeline;"
        "pipeline(['lag', '--help'])"
    )
    pytest.importorskip("pyspark")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    home, *said = ran.stdout.splitlines()
    assert home.count(f"{archive}/") == 2
    assert "--checkpoint" in "\n".join(said)


# --- checkpoints, lag and settle -----------------------------------------------------------------


def checkpoint(folder: Path, *batches: Any, done: int | None = None) -> str:
    """A checkpoint as Spark leaves it: *batches* were begun, those up to number *done* are done."""
    (folder / "offsets").mkdir(parents=True)
    (folder / "commits").mkdir()
    (folder / "metadata").write_text('{"id":"4711"}')
    for number, offset in enumerate(batches):
        lines = ["v1", '{"batchWatermarkMs":0}', json.dumps(offset) if offset else "-", "17"]
        (folder / "offsets" / str(number)).write_text("\n".join(lines))
        (folder / "offsets" / f".{number}.crc").write_bytes(b"crc")
        if done is not None and number <= done:
            (folder / "commits" / str(number)).write_text("v1\n{}")
    return str(folder)


def logs(served: Any, **parts: int) -> dict[str, Any]:
    """The offset of the log ``log`` at *parts*."""
    state = connections.call(served.endpoint, "log", "READ")
    numbers = {int(name[1:]): at for name, at in parts.items()}
    return offset_of({"log": (str(state["incarnation"]), numbers)})


def test_a_checkpoint_is_read_without_spark(tmp_path: Path) -> None:
    empty = checkpoint(tmp_path / "empty")
    found = read_checkpoint(empty)
    assert (found.query, found.planned, found.committed) == ("4711", None, None)
    offsets = [lease_offset({"q": ("i", 3)}), lease_offset({"q": ("i", 8)})]
    found = read_checkpoint(
        (tmp_path / "c").as_uri() if checkpoint(tmp_path / "c", *offsets, done=0) else ""
    )
    assert (found.planned, found.committed) == (1, 0)
    # The second source of the query is not ours.
    assert (found.begun, found.done) == ((offsets[1], {}), (offsets[0], {}))
    assert read_checkpoint(checkpoint(tmp_path / "d", None)).begun == ({}, {})


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no checkpoint: it has no file metadata of Spark"):
        read_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="reading it takes a session"):
        read_checkpoint("s3://lake/t/_checkpoint")
    folder = checkpoint(tmp_path / "c", lease_offset({"q": ("i", 3)}))
    (tmp_path / "c" / "offsets" / "0").write_text("v9\n{}\n{}")
    with pytest.raises(ValueError, match="offsets/0 cannot be read: it has the version 'v9'"):
        read_checkpoint(folder)


def test_folders_of_this_machine() -> None:
    assert local_path("a/b") == Path("a/b")
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    assert local_path("file:/a") == Path("/a")
    assert local_path("s3://a/b") is None
    assert local_path("hdfs:///a") is None


def test_places() -> None:
    offset = offset_of({"b": ("i", {1: 5, 0: 4})}) | lease_offset({"q": ("i", 9)})
    expected = {("b", 0): 4, ("b", 1): 5, ("q", None): 9}
    assert places_of(offset) == places_of(json.dumps(offset)) == expected
    assert places_of(None) == places_of("17") == places_of("x") == places_of({"k": 1}) == {}


def test_how_far_a_log_is_behind_and_what_is_settled(served: Any, tmp_path: Path) -> None:
    served.send("log", *(str(number) for number in range(20)))
    folder = checkpoint(tmp_path / "c", logs(served, p0=4, p1=3), logs(served, p0=7, p1=3), done=0)
    ask = Lag(url=served.url, checkpoint=folder, group="g")
    found = lag(None, ask)
    assert found.facts == {"query": "4711", "batch": 0, "behind": 13, "unsettled": 0}
    (table,) = found.sections
    assert table.rows == [["log", 0, 4, 7, None, 10, 6], ["log", 1, 3, 3, None, 10, 7]]
    assert found.exit_code == 0
    assert lag(None, Lag(url=served.url, checkpoint=folder, max_lag=12)).exit_code == 3

    connections.call(served.endpoint, "log", "SET-CURSOR", {0: 2, 1: 9}, group="g")
    tell = Settle(url=served.url, checkpoint=folder, group="g", dry_run=True)
    assert settle(None, tell).facts["settled"] == 2
    assert connections.call(served.endpoint, "log", "CURSOR", group="g") == {0: 2, 1: 9}
    tell = Settle(url=served.url, checkpoint=folder, group="g")
    assert settle(None, tell).facts["settled"] == 2
    # Cursors beyond the checkpoint stay where they are.
    assert connections.call(served.endpoint, "log", "CURSOR", group="g") == {0: 4, 1: 9}
    assert settle(None, tell).facts["settled"] == 0


def test_how_far_a_lease_is_behind_and_what_is_settled(served: Any, tmp_path: Path) -> None:
    served.send("in", *range(10))
    opened = connections.call(served.endpoint, "in", "OPEN-LEASE", group="g")
    generation = int(opened["generation"])
    connections.call(served.endpoint, "in", "LEASE", group="g", generation=generation, count=6)
    offsets = [lease_offset({"in": (opened["id"], number)}) for number in (4, 6)]
    folder = checkpoint(tmp_path / "c", *offsets, done=0)
    found = lag(None, Lag(url=served.url, checkpoint=folder, group="g"))
    assert found.facts == {"query": "4711", "batch": 0, "behind": 6, "unsettled": 4}
    tell = Settle(url=served.url, checkpoint=folder, group="g")
    assert settle(None, tell).facts["settled"] == 4
    state = connections.call(served.endpoint, "in", "LEASE-STATE", group="g")
    # The query that has the group goes on.
    assert (state["first"], state["next"], state["generation"]) == (4, 6, generation)
    assert settle(None, tell).facts["settled"] == 0


def test_a_log_that_is_another_one_is_trouble(served: Any, tmp_path: Path) -> None:
    offset = offset_of({"log": ("another", {0: 5}), "gone": ("i", {0: 1})})
    folder = checkpoint(tmp_path / "c", offset, done=0)
    for found in (
        lag(None, Lag(url=served.url, checkpoint=folder)),
        settle(None, Settle(url=served.url, checkpoint=folder, group="g")),
    ):
        assert found.exit_code == 3
        said = [section.text for section in found.sections[1:]]
        assert said == [
            "'gone' is not there any more",
            "'log' was deleted and made again since the checkpoint was begun",
        ]
    assert connections.call(served.endpoint, "log", "CURSOR", group="g") == {}


def test_a_lease_that_has_ended_is_trouble(served: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", lease_offset({"in": ("ended", 4)}), done=0)
    found = lag(None, Lag(url=served.url, checkpoint=folder, group="g"))
    assert (found.exit_code, found.sections[1].text) == (3, "'in' has no lease of the group 'g'")
    connections.call(served.endpoint, "in", "OPEN-LEASE", group="g")
    found = settle(None, Settle(url=served.url, checkpoint=folder, group="g"))
    assert "is another one than that of the checkpoint" in found.sections[1].text
    assert (found.exit_code, found.facts["settled"]) == (3, 0)
    found = lag(None, Lag(url=served.url, checkpoint=folder))
    assert "name the group" in found.sections[1].text


def test_a_checkpoint_of_something_else(served: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", {"topic": {"0": 3}}, done=0)
    with pytest.raises(ValueError, match="reads nothing from a broker of ours"):
        lag(None, Lag(url=served.url, checkpoint=folder))


@pytest.mark.slow
def test_the_command_needs_no_spark_for_a_checkpoint_here(served: Any, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    served.send("log", *(str(number) for number in range(20)))
    folder = checkpoint(tmp_path / "c", logs(served, p0=4, p1=3), done=0)
    found = run("lag", "--url", served.url, "--checkpoint", folder, "--max-lag", "5")
    assert found.exit_code == 3
    assert "lag: 13 behind" in found.output
    page = tmp_path / "lag.html"
    words = ["lag", "--url", served.url, "--checkpoint", folder, "--format=json"]
    found = run(*words, "--report", str(page))
    assert found.exit_code == 0
    assert json.loads(found.stdout)["facts"]["behind"] == 13
    assert "13 behind" in page.read_text("utf-8")


# --- how a command ends --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "-Xss4m"])
def test_a_quiet_start_keeps_the_options_of_java_that_are_given(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of ours would replace that of the user, of the platform or of spark-defaults.conf."""
    if given is None:
        monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    else:
        monkeypatch.setenv("SPARK_SUBMIT_OPTS", given)
    started: list[tuple[dict[str, str], str]] = []

    def session(master: str, *, name: str, conf: dict[str, str]) -> None:
        started.append((conf, os.environ["SPARK_SUBMIT_OPTS"]))

    monkeypatch.setattr(launching, "session", session)
    monkeypatch.setattr(launching, "find_spark", lambda: None)
    monkeypatch.setattr(launching, "find_spec", lambda name: name)
    launching.start("local[1]", {"spark.driver.extraJavaOptions": "-Dmine=1"}, name="test")
    ((conf, options),) = started
    assert conf["spark.driver.extraJavaOptions"] == "-Dmine=1"
    assert not any("Java" in key for key in conf.keys() - {"spark.driver.extraJavaOptions"})
    *before, ours = options.split()
    assert before == ([] if given is None else [given])
    assert ours.startswith("-Dlog4j2.configurationFile=file:")
    assert os.environ.get("SPARK_SUBMIT_OPTS") == given


_SIGNALLED = """
import signal, sys, threading
from amqp_rt_spark.jobs.launching import signals

stopping = threading.Event() if sys.argv[1] == "stream" else None
with signals(stopping):
    signal.raise_signal(signal.SIGTERM)
    print(stopping.is_set(), flush=True)
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(("kind", "code", "said"), [("stream", 130, "True\n"), ("other", 143, "")])
def test_the_first_signal_asks_a_stream_and_ends_anything_else(
    kind: str, code: int, said: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SIGNALLED, kind], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (code, said)
    assert ran.stderr == ("stopping after this batch; again to stop now\n" if said else "")


def test_handlers_of_signals_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals(threading.Event()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


#: Text that Spark 4.3 makes of an error in a worker of Python.
_WRAPPED = """[STREAM_FAILED] Query [id = 9a, runId = 7b] terminated with exception: [PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] \
Failed when Python streaming data source perform planPartitions: Traceback (most recent call last):
  File "/x/python_streaming_source_runner.py", line 279, in main
  File "/x/wire.py", line 388, in call
    raise AmqpError(
%s
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 9a, runId = 7b]
Current State: INITIALIZING
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "amqp_rt.errors.AmqpError: there is no node 'x' [amqp:not-found]",
            "there is no node 'x' [amqp:not-found]",
        ),
        ("amqp_rt_spark.data_loss.DataLost: they are gone", "they are gone"),
        ("ValueError: the option body is 'x'", "the option body is 'x'"),
        ("KeyError: 'x'", "KeyError: 'x'"),
    ],
)
def test_an_error_that_java_wrapped_is_its_sentence(raised: str, said: str) -> None:
    assert sentence_of(RuntimeError(_WRAPPED % raised)) == said


def test_other_errors_are_their_first_line() -> None:
    error = RuntimeError("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03\nat java")
    assert sentence_of(error) == "Path does not exist: file:/x."
    assert sentence_of(RuntimeError()) == "RuntimeError"
    said = "An error occurred while calling o1.load.\n: org.apache.X$Y: [NO_SUCH] None. SQLSTATE: 42K02"
    assert sentence_of(RuntimeError(said)) == "None."


# --- the guide -----------------------------------------------------------------------------------

_GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "pipelines.md"
_LINES = re.findall(r"^amqp-rt pipeline ((?:\\\n|.)+)$", _GUIDE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", _LINES)
def test_the_guide_says_what_there_is(line: str) -> None:
    pytest.importorskip("pyspark")
    parser = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    parser.whitespace_split = True
    # Without what the shell does with it.
    words = list(takewhile(lambda word: word not in ("||", "&&", "|", ">"), parser))
    if words[0] == "submit":
        words = words[words.index("--package") + 2 :]
    (job,) = (job for job in JOBS if job.name == words[0])
    with cli.command_of(job).make_context(job.name, words[1:]) as context:
        if config := context.params.pop("config"):
            assert f"# {config}, for amqp-rt pipeline {line}" in _GUIDE.read_text("utf-8")
            return
        cli.read_told(job.load()[1], config, context.params)
