"""What the status line says."""

import logging
from pathlib import Path

import pytest

from dflash_train import metrics
from support.runlog import log_step, open_log


def test_the_eta_forgets_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of a second, one of three hours among them: 199 lines later the 596 steps that are left take 596 s."""
    caplog.set_level(logging.INFO, logger="dflash")
    now, etas = 0.0, {}
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    log = open_log(tmp_path, 0, num_steps=1000)
    for step in range(1, 405):
        now += 10800.0 if step == 205 else 1.0
        log_step(log, step, 1.0, [[step, step]], 100.0)
        etas[step] = next(text for text in reversed(caplog.messages) if " eta " in text).split(" eta ")[1]
    log.close()
    assert [etas[step] for step in (1, 2, 204, 205, 403, 404)] == ["?", "16m38s", "13m16s", "12h12m", "9h09m", "9m56s"]
