"""Options in environment variables and files: which comes first, and what mistakes say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner, Result
from commands import Served

from amqp_rt.cli import OURS, main
from amqp_rt.cli.configured import ConfiguredCommand
from amqp_rt.cli.environment import SecretOption, name_variables
from amqp_rt.cli.groups import LazyGroup


def every_option() -> Iterator[tuple[str, click.Option]]:
    """Yield the options of our commands, each after the path of its command."""

    def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Option]]:
        for option in command.params:
            if isinstance(option, click.Option):
                yield path, option
        if isinstance(command, click.Group):
            for name, member in command.commands.items():
                yield from walk(f"{path} {name}", member)

    context = click.Context(main, auto_envvar_prefix="AMQP_RT")
    for name in OURS:
        command = main.get_command(context, name)
        assert command is not None
        yield from walk(name, command)


@pytest.mark.req("G6")
def test_every_option_has_a_variable_of_its_own() -> None:
    found = {}
    for path, option in every_option():
        assert isinstance(option.envvar, list)
        long = next(each for each in option.opts if each.startswith("--"))
        wanted = f"AMQP_RT_{path}_{long.lstrip('-')}".upper().replace(" ", "_").replace("-", "_")
        assert option.envvar[0] == wanted
        assert found.setdefault(wanted, option) is option
        # The name with _FILE belongs to no other option.
    for name, option in found.items():
        if isinstance(option, SecretOption):
            assert f"{name}_FILE" not in found
    assert {"AMQP_RT_SERVE_USER", "AMQP_RT_SERVE_CBS", "AMQP_RT_NODE_LIST_URL"} <= {
        name for name, option in found.items() if isinstance(option, SecretOption)
    }


def shown(*arguments: str, **environ: str) -> Result:
    """Run a command that shows its options; it is defined as ``serve`` is."""

    @click.command(cls=ConfiguredCommand)
    @click.option("--store", default="default")
    @click.option("--node", "declared", multiple=True)
    @click.option("--on/--off", default=False)
    @click.option("--user", "users", cls=SecretOption, multiple=True)
    @click.option("--url", cls=SecretOption, envvar="SHARED_URL", default="none")
    def example(
        store: str, declared: tuple[str, ...], on: bool, users: tuple[str, ...], url: str
    ) -> None:
        click.echo(f"{store} {','.join(declared)} {on} {','.join(users)} {url}")

    name_variables(example, "AMQP_RT_EXAMPLE")
    name_variables(example, "AMQP_RT_EXAMPLE")  # A second time changes nothing.
    return CliRunner().invoke(example, arguments, env=environ)


@pytest.mark.req("G6")
def test_the_line_comes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    config = tmp_path / "file.toml"
    config.write_text('store = "file"\nnode = ["file"]\n')
    in_file = ["--config", str(config)]
    variables = {"AMQP_RT_EXAMPLE_STORE": "environment", "AMQP_RT_EXAMPLE_NODE": "one two"}
    for arguments, environ, wanted in (
        ([], {}, "default  False  none"),
        (in_file, {}, "file file False  none"),
        ([], {"AMQP_RT_EXAMPLE_CONFIG": str(config)}, "file file False  none"),
        (in_file, variables, "environment one,two False  none"),
        ([*in_file, "--store", "line"], variables, "line one,two False  none"),
        ([*in_file, "--node", "line"], variables, "environment line False  none"),
        ([], {"AMQP_RT_EXAMPLE_ON": "true"}, "default  True  none"),
        ([], {"AMQP_RT_EXAMPLE_STORE": ""}, "default  False  none"),
        ([], {"SHARED_URL": "shared"}, "default  False  shared"),
        ([], {"SHARED_URL": "shared", "AMQP_RT_EXAMPLE_URL": "own"}, "default  False  own"),
    ):
        done = shown(*arguments, **environ)
        assert done.stdout == f"{wanted}\n", (arguments, environ, done.output)


@pytest.mark.req("G6")
def test_secrets_in_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ada:with a space\n\nbob:two\n")
    path = str(secret)
    for environ, wanted in (
        ({"AMQP_RT_EXAMPLE_USER_FILE": path}, "default  False ada:with a space,bob:two none"),
        ({"SHARED_URL_FILE": path}, "default  False  ada:with a space"),
        # The variable of the command comes first, in whichever form.
        ({"AMQP_RT_EXAMPLE_URL": "own", "SHARED_URL_FILE": path}, "default  False  own"),
        ({"AMQP_RT_EXAMPLE_URL_FILE": path, "SHARED_URL": "x"}, "default  False  ada:with a space"),
    ):
        assert shown(**environ).stdout == f"{wanted}\n", environ
    assert shown("--url", "line", AMQP_RT_EXAMPLE_URL_FILE="/none").stdout.endswith(" line\n")
    (tmp_path / "empty").write_text("\n")
    for environ, sentence in (
        ({"SHARED_URL_FILE": "/no/such"}, "cannot read the value of SHARED_URL_FILE from /no/such"),
        ({"SHARED_URL_FILE": str(tmp_path / "empty")}, "which is empty"),
        ({"SHARED_URL_FILE": path, "SHARED_URL": "x"}, "set one of them"),
    ):
        done = shown(**environ)
        assert done.exit_code == 2
        assert sentence in done.stderr
    # Only options that may have passwords are read from files.
    assert shown(AMQP_RT_EXAMPLE_STORE_FILE=path).stdout.startswith("default ")


@pytest.mark.slow
@pytest.mark.req("G6")
def test_a_broker_and_its_clients_run_by_the_environment_alone(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("ada:a secret\n")
    served = Served(
        cwd=tmp_path,
        AMQP_RT_SERVE_USER_FILE=str(tmp_path / "users"),
        AMQP_RT_SERVE_NODE="queue:work topic:news",
        AMQP_RT_SERVE_QUIET="true",
        AMQP_RT_SERVE_NAME="shop",
    )
    try:
        (tmp_path / "url").write_text(served.url.replace("://", "://ada:a%20secret@") + "\n")
        environ = {**os.environ, "AMQP_URL_FILE": str(tmp_path / "url")}
        environ |= {"AMQP_RT_NODE_LIST_JSON": "1"}
        told = subprocess.run(
            [sys.executable, "-m", "amqp_rt", "node", "list"],
            env=environ, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        assert [line.split('"')[3] for line in told.splitlines()] == ["news", "work"]
    finally:
        code, said = served.stop()
    assert (code, said) == (0, "")


@pytest.mark.req("G6")
@pytest.mark.parametrize(
    ("arguments", "variable", "hint"),
    [
        ("serve", "AMQP_RT_SERVE_LITSEN", "did you mean AMQP_RT_SERVE_LISTEN?"),
        ("send work x", "AMQP_RT_SEND_COUNTT", "did you mean AMQP_RT_SEND_COUNT?"),
        ("serve", "AMQP_RT_SERVE_USERS_FILE", "did you mean AMQP_RT_SERVE_USER_FILE?"),
        ("serve", "AMQP_RT_SERVE_STORE_PATH_FILE", "did you mean AMQP_RT_SERVE_STORE_FILE?"),
        ("node list", "AMQP_RT_NODE_LIST_JSNO", "did you mean AMQP_RT_NODE_LIST_JSON?"),
        ("node list", "AMQP_RT_NODE_LSIT_JSON", "did you mean AMQP_RT_NODE_LIST_JSON?"),
        ("doctor", "AMQP_RT_DOCTOR_QQQ", "amqp-rt doctor --help lists its options"),
        ("here there", "AMQP_RT_HERE_THERE_NOO", "did you mean AMQP_RT_HERE_THERE_NO?"),
    ],
)
def test_a_misspelt_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: str, variable: str, hint: str
) -> None:
    class Here(LazyGroup):
        def load_command(self, name: str) -> click.Command:
            return click.Command(name, params=[click.Option(["--no"])], help="Go there.")

    monkeypatch.setitem(main.commands, "here", Here("here"))

    def call(*words: str) -> Result:
        return CliRunner().invoke(main, words, env={variable: "secret"}, prog_name="amqp-rt")

    done = call(*arguments.split())
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {variable} is set, and amqp-rt ")
    assert done.stderr.endswith(f"has no such option; {hint}\n")
    assert "secret" not in done.stderr
    # The help has the right name.
    assert call(*arguments.split(), "--help").exit_code == 0


@pytest.mark.req("G6")
def test_variables_that_are_not_options_are_left_alone() -> None:
    """Those of other commands, of builds and tests, of empty values, and of services in Kubernetes."""
    environ = dict.fromkeys(
        (
            *("AMQP_RT_SERVE_LITSEN", "AMQP_RT_COMPILE", "AMQP_RT_PASSWORD_ADA", "AMQP_RT_LONG"),
            *("AMQP_RT_LIMITS_SERVICE_HOST", "AMQP_RT_LIMITS_SERVICE_PORT_AMQP"),
            *("AMQP_RT_LIMITS_PORT", "AMQP_RT_LIMITS_PORT_5672_TCP_ADDR", "AMQP_RT_WORKER"),
        ),
        "x",
    )
    done = CliRunner().invoke(main, ["limits"], env={**environ, "AMQP_RT_LIMITS_X": ""})
    assert done.exit_code == 0, done.output


@pytest.mark.req("G6")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    done = CliRunner().invoke(
        main, [], prog_name="amqp-rt", env={"_AMQP_RT_COMPLETE": f"{shell}_source"}
    )
    assert "_AMQP_RT_COMPLETE=" in done.stdout
    words = {"COMP_WORDS": "amqp-rt node cr", "COMP_CWORD": "2"}
    if shell == "bash":
        done = CliRunner().invoke(
            main, [], prog_name="amqp-rt", env={"_AMQP_RT_COMPLETE": "bash_complete", **words}
        )
        assert done.stdout == "plain,create\n"


@pytest.mark.req("G6")
def test_every_option_means_the_same_on_the_line_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    count = 0
    for path, option in every_option():
        context = click.Context(click.Command(path))
        if option.is_flag:
            texts, on_the_line = "true", True
        else:
            text = _fitting(option, context, str(file))
            on_the_line = (text, text) if option.multiple else text
            between = option.type.envvar_list_splitter or " "
            texts = f"{text}{between}{text}" if option.multiple else text
        assert option.envvar is not None
        monkeypatch.setenv(option.envvar[0], texts)
        value, source = option.consume_value(context, {})
        assert source is ParameterSource.ENVIRONMENT, (path, option.name)
        assert option.type_cast_value(context, value) == option.type_cast_value(
            context, on_the_line
        ), (path, option.name)
        monkeypatch.delenv(option.envvar[0])
        count += 1
    assert count > 200


def _fitting(option: click.Option, context: click.Context, file: str) -> str:
    """Return a text that *option* takes as its value."""
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    for text in (*map(str, choices), "x", "1", "100", "2s", "amqp://127.0.0.1", file):
        try:
            option.type_cast_value(context, (text,) if option.multiple else text)
        except click.UsageError:
            continue
        return text
    raise AssertionError(f"no text fits {option.name}: {option.type}")
