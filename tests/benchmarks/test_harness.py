"""The benchmarks' own arithmetic, and one small run of them from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_brokers
import pytest

import amqp_rt

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> ModuleType:
    """The package, which is no part of what is installed."""
    return foreign_brokers.benchmarks()


def results(**samples: list[float]) -> Any:
    """Results of one case with a rate for each contestant, a number for each round."""
    from benchmarks.results import Results

    found = Results({"cores": 2}, {name: f"{name} 1.0" for name in samples})
    for name, values in samples.items():
        for value in values:
            found.add("p2p", "100 B", name, {"rate": value, "ns": value})
    return found


def test_a_ratio_is_the_median_of_the_ratios_round_by_round() -> None:
    # The machine was twice as fast in the last round, for both.
    found = results(pure=[20, 22, 60], rhea=[10, 10, 20])
    assert found.ratio(found.get("p2p", "100 B", "pure", "rate"), "rhea") == pytest.approx(2.2)
    assert found.ratio(found.get("p2p", "100 B", "pure", "rate"), "nobody") is None


@pytest.mark.parametrize(
    ("metric", "floor", "stretch", "passed", "aim"),
    [
        ("rate", 1.5, 3, True, False),
        ("rate", 1.5, 2, True, True),
        ("rate", 2.5, None, False, False),
        ("ns", 2.5, 1.5, True, False),
        ("ns", 1.5, None, False, False),
    ],
)
def test_rates_must_reach_and_costs_must_not_exceed(
    metric: str, floor: float, stretch: float | None, passed: bool, aim: bool
) -> None:
    from benchmarks.results import Target, judge

    target = Target(
        measure="p2p",
        case="100 B",
        metric=metric,
        of="pure",
        against="rhea",
        floor=floor,
        stretch=stretch,
    )
    (verdict,) = judge(results(pure=[20], rhea=[10]), [target])
    assert (verdict.value, verdict.passed, verdict.aim) == (2, passed, aim)


def test_what_was_not_measured_is_not_judged() -> None:
    from benchmarks.results import Target, judge

    target = Target(
        measure="rpc", case="1 in flight", metric="calls", of="pure", against="rhea", floor=2
    )
    (verdict,) = judge(results(pure=[20]), [target])
    assert verdict.value is None


def test_saved_results_are_the_same_again(tmp_path: Path) -> None:
    from benchmarks.results import Results

    found = results(pure=[1, 2, 3], rhea=[4, 5, 6])
    found.absent["proton"] = "not installed"
    found.write(tmp_path / "now.json")
    again = Results.read(tmp_path / "now.json")
    assert [(one.key, one.values) for one in again] == [(one.key, one.values) for one in found]
    assert again.absent == found.absent


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (1, 0, float("inf")),
        (5, 0, float("inf")),
        (6, 1, 6),
        (8, 1, 8),
        (9, 2, 8),
        (11, 2, 10),
        (12, 3, 10),
    ],
)
def test_the_interval_of_a_median_needs_no_distribution(
    count: int, low: float, high: float
) -> None:
    from benchmarks.results import interval

    # Textbooks have these ranks in their tables of the sign test.
    assert interval(range(count, 0, -1)) == (low, high)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0] * 11, "not worse"),
        ([0.5] * 11, "not worse"),
        ([1.02] * 9 + [1.5, 1.6], "unclear"),
        ([1.02] * 10 + [1.5], "not worse"),
        ([1.05] * 10 + [0.9], "worse"),
        ([1.05] * 5, "unclear"),
    ],
)
def test_a_cost_is_worse_if_the_interval_of_its_pairs_says_so(
    ratios: list[float], verdict: str
) -> None:
    # The machine gets slower all the time, for both of a pair.
    before = [10.0 * (number + 1) for number in range(len(ratios))]
    now = [cost * ratio for cost, ratio in zip(before, ratios, strict=True)]
    found = results(**{"before-pure": before, "pure": now})
    (change,) = found.changes("before-", 0.03)
    assert (change.series.contestant, change.series.metric, change.verdict) == (
        "pure",
        "ns",
        verdict,
    )


def test_every_other_round_goes_backwards() -> None:
    from benchmarks.results import Results
    from benchmarks.rounds import Case, Progress, run

    order: list[str] = []

    def measured(name: str) -> dict[str, float]:
        order.append(name)
        return {"ns": 1.0}

    case = Case("codec", "c", {name: lambda name=name: measured(name) for name in "ab"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.rounds.calibrate", lambda: 1.0)
        run(case, Results({}, {}), 3, Progress(6))
    assert order == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("speeds", "repeats", "samples"),
    [
        ([1.0, 1.2], 2, 1),
        ([1.0, 1.3, 1.3, 1.3], 2, 2),
        ([1.0, 1.3, 1.0, 1.3, 1.0, 1.3], 2, 3),
        ([1.0, 1.3], 0, 1),
    ],
)
def test_a_sample_is_repeated_if_the_machine_changed(
    speeds: list[float], repeats: int, samples: int
) -> None:
    from benchmarks.results import Results
    from benchmarks.rounds import Case, Progress, run

    taken = iter([{"ns": 1.0}, {"ns": 2.0}, {"ns": 3.0}])
    found = Results({}, {"pure": "pure 1.0"})
    case = Case("codec", "c", {"pure": lambda: next(taken)})
    with pytest.MonkeyPatch.context() as patch:
        steps = iter(speeds)
        patch.setattr("benchmarks.rounds.calibrate", lambda: next(steps))
        run(case, found, 1, Progress(1), repeats)
    assert [series.values for series in found] == [[float(samples)]]
    assert next(steps, None) is None


#: Whose brokers keep durable messages.
KEEPERS = ("compiled", "pure", "rabbitmq")


def test_every_target_names_a_case_that_is_measured() -> None:
    from benchmarks.contestants import CLIENT_ROLES, OWN_ROLES, Contestant, Field
    from benchmarks.measures import (
        Plan,
        Settings,
        amqp010,
        amqp091,
        attacked,
        broker,
        codec,
        cores,
        door,
        doors,
        durable,
        growth,
        memory,
        mesh,
        observed,
        p2p,
        recovery,
        rpc,
        seeds,
        servicebus,
        setup,
        spark,
        start,
    )

    field = Field()
    clients091 = ("amqplib", "pika")
    names = ("compiled", "pure", "proton", "rhea", "proton-c", "rabbitmq", "spark", *clients091)
    names += ("pyamqp",)
    for name in names:
        field.present[name] = Contestant(
            name,
            name,
            roles=OWN_ROLES if name in ("compiled", "pure") else CLIENT_ROLES,
            broker=None if name in ("rhea", "pyamqp", *clients091) else nullcontext,  # type: ignore[arg-type]
            broker091=nullcontext if name in KEEPERS else None,  # type: ignore[arg-type]
            broker010=nullcontext if name in ("compiled", "pure") else None,  # type: ignore[arg-type]
            durable_broker=nullcontext if name in KEEPERS else None,  # type: ignore[arg-type]
            kept_broker=nullcontext if name in KEEPERS else None,  # type: ignore[arg-type]
            doors=nullcontext if name in ("compiled", "pure") else None,  # type: ignore[arg-type]
            namespace=name in ("compiled", "pure"),
        )
    settings = Settings(seconds=1, sizes=(0, 100, 1024, 65_536), quick=False)
    known = {("codec", case) for case in codec.CASES.values()}
    with ExitStack() as stack:
        plan = Plan(settings, field, stack)
        for measure in (
            *(p2p, rpc, broker, durable, setup, start, memory, growth),
            *(
                recovery,
                doors,
                attacked,
                seeds,
                spark,
                amqp091,
                amqp010,
                servicebus,
                mesh,
                observed,
                door,
                cores,
            ),
        ):
            known |= {(case.measure, case.name) for case in measure.cases(plan)}
    with (FOLDER / "targets.toml").open("rb") as file:
        targets = tomllib.load(file)["target"]
    assert {(target["measure"], target["case"]) for target in targets} <= known


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path, brief_run: bool) -> None:
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    measures = {"rpc", "durable", "codec"} | (set() if brief_run else {"p2p", "setup", "broker"})
    command = [
        *(sys.executable, "-m", "benchmarks", *sorted(measures)),
        *("--peers", "none", "--mode", mode, "--compiled-python", sys.executable),
        *("--sizes", "100", "--rounds", "1", "--repeats", "0", "--seconds", "0.5"),
        *("--json", str(tmp_path / "now.json"), "--markdown", str(tmp_path / "page.md")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"amqp_rt {amqp_rt.__version__} {mode}" in done.stdout
    saved = json.loads((tmp_path / "now.json").read_text())
    assert saved["failures"] == {}
    assert measures == {series["measure"] for series in saved["series"]}
    assert (tmp_path / "page.md").read_text().startswith("# Benchmarks")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="CPU is counted by /proc")
def test_what_a_broker_costs_after_a_crash_under_attack_and_through_its_doors(
    tmp_path: Path, brief_run: bool
) -> None:
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    measures = ["recovery", "doors", "cores", "attacked", *([] if brief_run else ["seeds"])]
    program = f"""
import sys
from benchmarks.measures import attacked, doors, recovery
recovery.COUNTS = {{0: "an empty store", 300: "a few"}}
recovery.QUICK_MAX = recovery.FULL = 300
recovery.THROUGH = 100
doors.SIZES = (100,)
doors.WAYS = {{name: doors.WAYS[name] for name in ("amqp", "wss")}}
attacked._FULL = attacked._MANY = 100
attacked.ATTACKS = {{"pings": attacked.ATTACKS["pings"]}}
from benchmarks.__main__ import main
main([*{measures}, "--quick", "--repeats", "0", "--seconds", "0.05", "--mode", "{mode}",
      "--compiled-python", sys.executable, "--json", {str(tmp_path / "now.json")!r}])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    assert saved["failures"] == {}
    found = {(one["measure"], one["metric"]) for one in saved["series"]}
    assert {measure for measure, _ in found} == {*measures}
    assert found >= {
        ("recovery", "accepted_s"),
        ("recovery", "peak"),
        ("recovery", "slope"),
        ("doors", "over_tcp"),
        ("cores", "two_cores"),
        ("attacked", "step_ms"),
    }


@pytest.mark.slow
def test_observers_are_compared_with_none(tmp_path: Path) -> None:
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    program = f"""
import sys
from benchmarks.measures import observed
observed.HOW = {{"sampled": "OpenTelemetry"}}
observed.WHAT = {{False: "messages"}}
from benchmarks.__main__ import main
main(["observed", "--rounds", "1", "--repeats", "0", "--seconds", "0.2", "--mode", "{mode}", "--peers", "none",
      "--compiled-python", sys.executable, "--json", {str(tmp_path / "now.json")!r}])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    assert saved["failures"] == {}
    found = {one["metric"]: one["values"] for one in saved["series"]}
    assert found["over_off"][0] > 1
    assert found["hand_us"][0] > 0
    assert found["own_us"][0] == pytest.approx(found["span_us"][0] - found["hand_us"][0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="CPU is counted by /proc")
def test_clients_of_0_9_1_go_through_a_broker(tmp_path: Path) -> None:
    """Also through a topic exchange, where amqplib is there."""
    pytest.importorskip("pika")
    pytest.importorskip("amqp_rt_amqp091")
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    program = f"""
import sys
from benchmarks.measures import amqp091
amqp091.BINDINGS = (10,)
from benchmarks.__main__ import main
main(["amqp091", "--peers", "pika,amqplib", "--sizes", "100", "--rounds", "1", "--repeats", "0", "--seconds", "0.2",
      "--mode", "{mode}", "--compiled-python", sys.executable,
      "--json", {str(tmp_path / "now.json")!r}])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    assert saved["failures"] == {}
    found = {one["case"] for one in saved["series"]}
    expected = {"100 B transient, pika", "100 B persistent, pika"}
    if "amqplib" not in saved["absent"]:
        expected |= {"100 B transient, amqplib", "topic with 10 bindings, amqplib"}
    assert found >= expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="CPU is counted by /proc")
def test_clients_of_0_10_go_through_a_broker(tmp_path: Path) -> None:
    pytest.importorskip("amqp_rt_amqp091")
    pytest.importorskip("amqp_rt_amqp010")
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    command = [
        *(sys.executable, "-m", "benchmarks", "amqp010", "--peers", "none", "--rounds", "1"),
        *("--repeats", "0", "--seconds", "0.2", "--mode", mode),
        *("--compiled-python", sys.executable, "--json", str(tmp_path / "now.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    assert saved["failures"] == {}
    found = {(one["case"], one["metric"]) for one in saved["series"]}
    assert found >= {
        ("100 B transient", "over_091"),
        ("100 B persistent", "over_091"),
        ("100 B published one by one", "p50_ms"),
        ("session of 5,000 messages", "resumed_s"),
    }


@pytest.mark.slow
def test_without_spark_it_is_said(tmp_path: Path) -> None:
    """Whatever is missing, it is a sentence; what else was asked for is measured."""
    command = [
        *(sys.executable, "-m", "benchmarks", "codec", "spark", "--peers", "none"),
        *("--quick", "--repeats", "0", "--compiled-python", sys.executable),
        *("--json", str(tmp_path / "now.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "absent: spark: not among --peers" in done.stdout
    program = """
import json, sys
sys.modules["pyarrow"] = sys.modules["pyspark"] = None
sys.argv = ["", "version", "{}"]
import runpy
runpy.run_path("benchmarks/roles/on_spark.py", run_name="__main__")
"""
    run = [sys.executable, "-c", program]
    said = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(said)["absent"].endswith(" is not installed (make .venv/spark)")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_spark_is_measured(tmp_path: Path) -> None:
    if amqp_rt.COMPILED:
        pytest.skip("Spark runs with the editable tree")
    command = [
        *(sys.executable, "-m", "benchmarks", "spark", "--peers", "spark", "--mode", "pure"),
        *("--rounds", "1", "--repeats", "0", "--seconds", "0.05"),
        *("--json", str(tmp_path / "now.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    if reason := saved["absent"].get("spark"):
        pytest.skip(reason)
    assert saved["failures"] == {}
    found = {(one["metric"], one["contestant"]) for one in saved["series"]}
    assert found >= {
        *(("rows", one) for one in ("pure", "spark")),
        *(("batch_ms", one) for one in ("pure", "spark")),
        *((metric, "pure") for metric in ("of_direct", "over_direct", "server_cpu_us")),
    }


@pytest.mark.slow
def test_help_teaches() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("p2p", "growth", "--check", "Examples"):
        assert word in said
    wrong = [sys.executable, "-m", "benchmarks", "--peers", "nobody"]
    refused = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no such peer: nobody" in refused.stderr
    wrong = [sys.executable, "-m", "benchmarks", "rpc", "--peers", "none", "--case", "7 in flight"]
    refused = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no case has '7 in flight' in its name" in refused.stderr


@pytest.mark.slow
def test_one_case_of_a_measure(tmp_path: Path) -> None:
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    command = [
        *(sys.executable, "-m", "benchmarks", "rpc", "codec", "--case", "1 in flight"),
        *("--peers", "none", "--mode", mode, "--compiled-python", sys.executable),
        *(
            "--rounds",
            "1",
            "--repeats",
            "0",
            "--seconds",
            "0.1",
            "--json",
            str(tmp_path / "now.json"),
        ),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "now.json").read_text())
    assert {series["case"] for series in saved["series"]} == {"1 in flight"}


def test_help_describes_each_measure() -> None:
    from benchmarks.__main__ import MEASURES

    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    described = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(MEASURES) <= described
