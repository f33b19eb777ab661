"""Verdicts on accounts written by hand, and the watches."""

import re
import threading

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from dflash_data.clock import OTHER, StageClock
from dflash_data.packs import STATS
from dflash_train.mesh import Split
from dflash_train.verdict import DRAFTER, Accounts, judge
from dflash_train.watch import CompileWatch, SpeedWatch

SPLIT = Split(5, 3, colocated=False)


def accounts(targets: dict[str, object], drafters: dict[str, object], *, gpu: bool = False) -> Accounts:
    """20 packs of each target rank; values for all ranks or one by one; drafter seconds of a 10 s interval."""
    table = np.zeros((5, 1 + len(STATS)))
    table[:, 0] = 20
    for name, value in ({"document_tokens": 1000, "busy": -1.0} | targets).items():
        table[:, 1 + STATS.index(name)] = 20 * np.asarray(value)
    other = np.zeros((3, len(DRAFTER)))
    for name, value in ({"packs": 100 / 3, "busy": -1.0} | drafters).items():
        other[:, DRAFTER.index(name)] = value
    return Accounts(SPLIT, 12, table, other, gpu)


BUSY = {"compute": 9.5, "receive": 0.5, "wait": 0.2}
UNKNOWN = {"busy": -1.0}
STARVED = {"compute": 2.0, "receive": 8.0, "wait": 8.0, "busy": 0.03}
LAUNCHED = {"forward_s": 0.5, "device_s": 0.51}
QUICK = {"forward_s": 0.1, "data_s": 0.01}


@pytest.mark.parametrize(
    ("targets", "drafters", "name", "evidence"),
    [
        (QUICK | {"send_s": 0.3}, BUSY, "drafter-bound", "a drafter rank takes 0.294 s a pack, a target rank 0.11 s"),
        ({"forward_s": 0.5, "q_pre": 46}, STARVED | UNKNOWN, "target-bound", "drafter ranks wait 80% of the time"),
        ({"forward_s": 0.5, "q_pre": 46}, STARVED, "starved GPU, target-bound", "3% busy.*forward.*q_pre 46 46 46"),
        ({"forward_s": 0.1, "data_s": 0.4}, STARVED | UNKNOWN, "data-bound", r"waiting for data \(q_pre 0"),
        (QUICK | {"send_s": 0.5}, STARVED | UNKNOWN, "channel-bound", "handing packs over that the drafters wait"),
        (QUICK | {"other_s": 0.5}, STARVED | UNKNOWN, "host-bound", "outside of data, forward and sending"),
        ({"forward_s": 0.02, "device_s": 0.5, "send_s": 0.5}, STARVED | UNKNOWN, "target-bound", "0.5 s a pack in"),
        (LAUNCHED, STARVED | UNKNOWN, "host-bound", "launching the forward"),
        (LAUNCHED | {"busy": 0.6}, STARVED | UNKNOWN, "host-bound", r"as their GPUs take for it \(60% busy\)"),
        (LAUNCHED | {"busy": 0.97}, STARVED | UNKNOWN, "target-bound", "in the target's forward"),
        (QUICK, BUSY | {"compile": 4.0}, "compiling", "4.0 s of 10.0 s"),
        (QUICK, BUSY | {"save": 5.0}, "checkpoint", "5.0 s of 15.0 s"),
        (QUICK, BUSY | {"other": 6.0}, "host-bound", "drafter rank 5 spends 38% of its time outside"),
        (QUICK, BUSY | {"agree": [3.0, 0.0, 3.0]}, "drafter-bound", "drafter rank 6 is slower than the others"),
        (
            {"forward_s": 0.1, "data_s": [0.01, 0.01, 0.4, 0.01, 0.01], "agree_s": [0.39, 0.39, 0.0, 0.39, 0.39]},
            STARVED | UNKNOWN, "data-bound", "target rank 2, for which the others wait, spend 0.4 s a pack",
        ),
    ],
)  # fmt: skip
def test_each_cause_by_hand(targets: dict[str, object], drafters: dict[str, object], name: str, evidence: str) -> None:
    found = judge(accounts(targets, drafters))
    assert found.name == name
    assert re.search(evidence, found.evidence), found


def test_what_another_split_would_give() -> None:
    seen = accounts(QUICK, BUSY)
    assert seen.drafter_packs_s == pytest.approx(100 / 9.8)
    assert seen.target_packs_s == pytest.approx(5 / 0.11)
    assert [(t, d) for t, d, _ in seen.splits()] == [(7, 1), (6, 2), (5, 3), (4, 4), (2, 6)], "12 packs a step"
    assert judge(seen).advice == "mesh.target=2 mesh.drafter=6 would give about 1.8x"
    assert seen.rate_of(2, 6) == pytest.approx(2 / 0.11)
    assert accounts(QUICK | {"forward_s": 0.5}, BUSY | {"wait": 0.9}).rates()["wait_share"] == pytest.approx(0.09)


def test_launching_as_long_as_the_device_takes_is_the_hosts_fault() -> None:
    assert judge(accounts(QUICK, BUSY | {"device": 0.1}, gpu=True)).name == "host-bound"
    assert judge(accounts(QUICK, BUSY | {"device": 5.0}, gpu=True)).name == "drafter-bound"
    assert judge(accounts(QUICK, BUSY | {"device": 0.1, "busy": 0.7}, gpu=True)).evidence.endswith("(70% busy)")
    assert judge(accounts(QUICK, BUSY | {"device": 0.1, "busy": 0.97}, gpu=True)).name == "drafter-bound"


def test_stages_add_up_to_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StageClock()  # at 0
    with clock.stage("receive"), clock.stage("forward"):  # from 1, from 3 to 6; left at 10
        pass
    assert clock.take() == {OTHER: 1.0 + 5.0, "receive": 2.0 + 4.0, "forward": 3.0}
    assert clock.take() == {OTHER: 0.0}


# The watches ---------------------------------------------------------------------------------------------------------


def test_compilations_are_counted_and_those_after_the_first_step_are_news() -> None:
    alarms: list[str] = []
    torch._dynamo.reset()  # also forgets the callbacks
    watch = CompileWatch(alarms.append)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    first = watch.take()
    assert (first.count, first.reasons) == (1, [])
    assert first.seconds > 0
    compiled(torch.ones(3))
    assert watch.take().count == 0
    watch.settle()
    compiled(torch.ones(4))
    again = watch.take()
    assert again.count == 1
    assert "double (" in again.reasons[0]
    assert "size mismatch" in again.reasons[0]
    assert not alarms
    other = threading.Thread(target=lambda: compiled(torch.ones(5)), name="intruder")
    other.start()
    other.join()
    assert alarms == ["thread intruder compiles; only the main thread may"]
    watch.close()
    torch._dynamo.reset()


def test_the_flag_that_hid_the_race_is_reported() -> None:
    alarms: list[str] = []
    with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
        CompileWatch(alarms.append).close()
    assert "force_compile_during_fx_trace is on" in alarms[0]


def test_a_lasting_fall_below_half_is_an_alarm_once() -> None:
    watch = SpeedWatch(None)
    speeds = [900.0, 20_000.0, 20_000.0, 4_400.0, 20_000.0, 4_400.0, 4_400.0, 4_400.0, 4_400.0]
    alarms = [watch.add(speed, f"account {number}") for number, speed in enumerate(speeds)]
    assert [number for number, alarm in enumerate(alarms) if alarm] == [7]
    assert alarms[7] == (
        "4.40 ktok/s for 3 log intervals is less than half of this run's best (20.00); then: account 2; now: account 7"
    )
    expecting = SpeedWatch(50_000.0)
    alarms = [expecting.add(20_000.0, "x") for _ in range(6)]
    assert [number for number, alarm in enumerate(alarms) if alarm] == [4]
    assert "half of trainer.expected_ktok_s (50.00)" in str(alarms[4])


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="the flag is thread-local there")
def test_the_race_this_project_comes_from() -> None:
    """One thread traces; meanwhile compiled flex_attention fails in another, as torch's tracing flag is one for all."""
    inside, done = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        done.wait(30)
        return x * 2

    tracer = threading.Thread(target=lambda: make_fx(traced)(torch.ones(2)))
    tracer.start()
    inside.wait()
    query = torch.randn(1, 1, 16, 16)
    with pytest.raises(RuntimeError, match="FX to symbolically trace a dynamo-optimized function"):
        torch.compile(flex_attention, backend="eager", fullgraph=True)(query, query, query)
    done.set()
    tracer.join()
    torch._dynamo.reset()
