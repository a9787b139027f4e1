"""Fuzz one target of ``fuzz_targets.py`` with atheris, guided by coverage.

    python tests/fuzz/hunt.py TARGET [FLAGS OF LIBFUZZER] [FILES]

With files, tries these and ends. Otherwise begins with the corpus of the target. Interesting inputs are kept in ``.build/fuzz/TARGET``, where the
next hunt continues; an input that breaks the target is written beside that folder, and its path is printed.
Needs the extra ``fuzz`` and the plain modules: those that mypyc compiles cannot be instrumented.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / ".build" / "fuzz"
#: Bounds for one input; a flag that is given again overrides them.
BOUNDS = ["-max_len=4096", "-timeout=1", "-rss_limit_mb=512"]
#: Targets that write files or run event loops have more time, for busy machines.
SLOW = {
    name: ["-timeout=5"]
    for name in (*("websocket", "store", "users", "trace", "frames", "sasl", "engine010", "http"),)
}


def main(target: str, *flags: str) -> None:
    """Hunt until libFuzzer's flags end it, or an input fails."""
    # Where pytest looks too: some targets are clients of the tests of a plug-in.
    sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "plugins" / "amqp010" / "tests")]
    with atheris.instrument_imports(
        include=[
            *("amqp_rt", "amqp_rt_amqp010", "amqp_rt_rabbitmq", "amqp_rt_servicebus"),
            "amqp_rt_spark",
        ]
    ):
        from fuzz_targets import TARGETS

        import amqp_rt
    if amqp_rt.COMPILED:
        raise SystemExit("compiled modules cannot be instrumented: install amqp_rt with --editable")
    if target not in TARGETS:
        raise SystemExit(f"no such target: {target}; there are {', '.join(TARGETS)}")
    learned = BUILD / target
    learned.mkdir(parents=True, exist_ok=True)
    told = [each for each in flags if each.startswith("-")]
    inputs = [each for each in flags if each not in told]
    inputs = inputs or [str(learned), str(HERE / "corpus" / target)]
    prefix = f"-artifact_prefix={BUILD}/{target}-"
    bounds = [*BOUNDS, *SLOW.get(target, ()), prefix]
    atheris.Setup([sys.argv[0], *bounds, *told, *inputs], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
