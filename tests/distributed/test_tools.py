"""The tools as a user starts them."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dflash.model as reference
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

import export
from bench_costs import bench_costs
from bench_mask import bench_mask
from bench_peer import bench_peer
from bench_pipeline import bench_pipeline
from dflash_data.target import find_target
from dflash_model import Drafter, Sampling, UserError, generate, load_drafter
from dflash_model.decoding import _Session
from dflash_model.taps import context_features
from dflash_train.cli import parse
from dflash_train.config import RunConfig
from dflash_train.dryrun import report
from dflash_train.job import check_job

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tools" / "configs"


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "tools/train.py",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_wrong_setting_is_one_sentence_and_all_ranks_leave() -> None:
    result = torchrun(
        2, "config=tools/configs/debug.yaml", "trainer.packs_per_step=5", "mesh.target=1", "mesh.drafter=2"
    )
    assert result.returncode == 1  # torchrun's own
    assert result.stderr.count("error: mesh.target (1) + mesh.drafter (2) must equal the number of ranks (2") == 1
    assert "exitcode  : 2" in result.stderr
    assert "dflash_train" not in result.stderr, "a traceback of ours"


def test_a_dflash_drafter_becomes_a_dflash2_one(tmp_path: Path) -> None:
    """Trained, trained on as DFlash2, exported: z-lab's package reads it and writes the target's own greedy text."""
    described = parse(RunConfig, [f"config={CONFIGS / 'debug.yaml'}"], "").target.config
    folder = tmp_path / "target"
    AutoModelForCausalLM.from_config(find_target(None, described).config, dtype=torch.float32).save_pretrained(folder)
    shared = [
        "config=tools/configs/debug.yaml", f"data.path={tmp_path / 'data'}", "trainer.steps=3", "evaluate.packs=2",
        "log.interval=1", "optimizer.lr=0.02", f"target.path={folder}",
    ]  # fmt: skip
    assert torchrun(2, *shared, f"run.dir={tmp_path / 'a'}").returncode == 0
    start = tmp_path / "a" / "checkpoints" / "step-3" / "dflash"
    result = torchrun(2, *shared, f"run.dir={tmp_path / 'b'}", "drafter.kind=dflash2", f"drafter.init_from={start}")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["selector_loss"] < math.log(16) + 0.1 and 0 < row["selector_missed"] < 1 for row in rows)
    refused = torchrun(2, *shared, f"run.dir={tmp_path / 'a'}", "optimizer.beta1=0.5").stderr
    assert "error: run.dir holds a run with optimizer.beta1 = 0.9, this one has 0.5;" in refused
    assert refused.count("error: ") == 1, "the other rank leaves without a word"
    out = tmp_path / "b-dflash"
    assert export.main([f"checkpoint.path={tmp_path / 'b' / 'checkpoints' / 'step-3'}", f"export.path={out}"]) == 0
    assert "# DFlash2 drafter for" in (out / "README.md").read_text()

    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = [3, 17, 5, 90, 41]
    plain = generate(None, target, prompt, max_new_tokens=20).token_ids
    mine = load_drafter(out, dtype=torch.float32)
    assert generate(mine, target, prompt, max_new_tokens=20).token_ids == plain
    theirs = reference.DFlash2DraftModel.from_pretrained(out, dtype=torch.float32).eval()
    assert theirs.candidate_selector.successor_codebook.weight.abs().max() > 0
    # Their loop cannot take tokens back from this hybrid target's states; drafts do not depend on it.
    for length in (4, 11):
        text = prompt + plain[:length]
        context = context_features(target, text[:-1], mine.config.target_layer_ids)[None]
        ids = torch.tensor([[text[-1], *[mine.config.mask_token_id] * 7]])
        positions = torch.arange(len(text) + 7)[None]
        with torch.no_grad():
            block = target.get_input_embeddings()(ids)
            hidden = theirs(position_ids=positions, noise_embedding=block, target_hidden=context)[:, 1:]
            expected, *_ = theirs.propose(hidden, ids[:, 0], target.get_output_embeddings(), 0.0)
        assert draft(mine, target, text) == expected[0].tolist()


def draft(drafter: Drafter, target: PreTrainedModel, text: list[int]) -> list[int]:
    """What the drafter proposes behind a text, its context taken in one piece."""
    session = _Session(drafter, target, Sampling())
    session.context_BSE = context_features(target, text[:-1], drafter.config.target_layer_ids)[None]
    with torch.no_grad():
        return session._propose(drafter, text[-1])[0].tolist()


def test_dry_run_of_the_reference_machine() -> None:
    """Figures of the published models; the whole plan is made from shapes."""
    text, too_much = report(check_job(parse(RunConfig, [f"config={CONFIGS / 'qwen3.6-27b.yaml'}"], ""), None))
    assert not too_much
    assert "26.896 B parameters, 64 layers; built up to tap 61: 24.869 B" in text
    assert "1.730 B parameters, 5 layers, block 16, taps [1, 16, 31, 46, 61]" in text
    assert "8: 5 target + 3 drafter ranks" in text
    assert text.count("sliding_attention") == 4
    assert "4 on each drafter rank" in text
    assert "a new run starts from drawn weights" in text


def test_dry_run_of_a_dflash2_drafter() -> None:
    """What is new at 27B: two convolutions in five layers, two codebooks, one projection; 3 % more arithmetic."""
    argv = [f"config={CONFIGS / 'qwen3.6-27b.yaml'}", "drafter.kind=dflash2"]
    text, _ = report(check_job(parse(RunConfig, argv, ""), None))
    assert "1.924 B parameters, 5 layers, block 16" in text
    assert "DFlash2: convolutions 65.7 M, codebooks 127.1 M, their projection 1.3 M of these parameters" in text
    slots = 512 * 16
    added = 5 * 2 * 5120 * (2 * 2 * 320) + 256 * (5120 + 16)
    assert f"{122.2 + 2 * 3 * slots * added / 1e12:.1f} TFLOP" in text


def test_dry_run_refuses_what_cannot_fit() -> None:
    argv = [f"config={CONFIGS / 'qwen3.6-27b.yaml'}", "mesh.memory_gib=24"]
    text, too_much = report(check_job(parse(RunConfig, argv, ""), None))
    target, drafter = too_much
    assert target.startswith("mesh.memory_gib is 24; a target rank would need 56.")
    assert "GiB: use target.reshard_after_forward=true" in target
    assert "a drafter rank would need" in drafter
    assert "fits" not in text


def test_dry_run_plans_for_torchruns_ranks() -> None:
    """14 bytes a parameter in a checkpoint: fp32 weights and moments, and the drafter in bf16."""
    argv = [f"config={CONFIGS / 'qwen3-8b.yaml'}", "mesh.target=null", "mesh.drafter=null", "dry_run=true"]
    text, too_much = report(check_job(parse(RunConfig, argv, ""), 8))
    assert "ranks        8: 5 target + 3 drafter ranks" in text
    assert not too_much
    assert f"a checkpoint {1.048626432e9 * 14 / 2**30:.1f} GiB in run.dir" in text


def test_importing_is_light() -> None:
    """No JAX, no CUDA, no process group; the model alone brings no torchtitan and no datasets."""
    check = (
        "import sys, torch, dflash_model; assert not {'torchtitan', 'datasets', 'jax'} & set(sys.modules);"
        "import dflash_train.run; assert 'jax' not in sys.modules; assert not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized(); print('light')"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.strip() == "light", result.stderr


def test_the_pipeline_bench_times_whole_jobs_and_leaves_nothing() -> None:
    """Its rate of the job: 4 steps of 6 packs of 256 tokens over an interval without the time of its log."""
    arguments = ["config=tools/configs/debug.yaml", "log.interval=4", "warmup=1", "repeats=1"]
    process = subprocess.Popen(
        [sys.executable, "tools/bench.py", "pipeline", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # on a busy machine a second thread's spinning costs minutes
    )  # fmt: skip
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads(printed.splitlines()[-1])
    assert found["split"] == "1 rank(s), target and drafter colocated"
    seconds = found["seconds"]["interval_s"] - found["seconds"]["drafter_log_s"]
    assert found["ktok_s"] == pytest.approx(4 * 6 * 0.256 / seconds, rel=1e-3)
    assert not (Path(tempfile.gettempdir()) / f"dflash-bench-{process.pid}").exists()


def test_the_pipeline_bench_refuses_intervals_that_a_queue_outlasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    mesh = ["mesh.target=1", "mesh.drafter=1", "trainer.packs_per_step=2"]
    with pytest.raises(UserError, match=r"log.interval is 4, 8 packs of each drafter rank; it must be at least 8:"):
        bench_pipeline(["config=tools/configs/debug.yaml", "log.interval=4", *mesh])


def test_the_mask_bench_counts_tiles() -> None:
    """Four documents of two tiles: each sees one context tile whole and two in part, and its own two tiles in part."""
    arguments = ["seq_len=1024", "anchors=64", "documents=4", "warmup=0", "repeats=1"]
    found = bench_mask(arguments)
    dist.destroy_process_group()
    assert (found["tiles"], found["full_tiles"], found["partial_tiles"]) == (8 * 16, 4, 16)


def test_the_costs_bench_changes_one_setting_at_a_time() -> None:
    """By counted products; a wrong setting is refused before anything runs."""
    tiny = ["preset=tiny", "seq_len=128", "anchors=16", "block_size=8", "compile=false", "repeats=1", "warmup=0"]
    with pytest.raises(UserError, match=r"^anchor .* is not a key; the nearest is anchors"):
        bench_costs([*tiny, "vary=anchor=32"])
    rows = bench("costs", *tiny, "vary=packs=2,num_layers=1", command=[sys.executable])["rows"]
    assert [row["setting"] for row in rows] == ["as given", "packs=2", "num_layers=1"]
    head, fused = 4 * (16 * 7) * 256 * 1024, 6 * 128 * (5 * 256) * 256
    layer = 6 * 256 * (128 * 2048 + (16 * 8) * (2 * 4096 + 2048 + 3 * 512))
    counted = [head + fused + 5 * layer, 2 * (head + fused + 5 * layer), head + fused + layer]
    assert [row["counted_tflop"] for row in rows] == pytest.approx([flops / 1e12 for flops in counted], rel=1e-3)


def test_the_channel_bench_counts_bytes() -> None:
    """Five packs to each of two drafters; beside its context features a pack has 13 bytes a token and 8 a slot."""
    arguments = ["mesh.target=1", "mesh.drafter=2", "seq_len=1024", "context_size=512", "anchors=64", "packs=5"]
    found = bench("channel", *arguments, command=[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"])
    assert found["packs"] == 10
    size = found["pack_mib"] * 2**20
    assert 0 < size - 1024 * (512 * 2 + 13) - 64 * (2 * 4 + 16 * 8) < 2048  # the header and what aligns fields
    assert found["gb_s"] == pytest.approx(10 * size / found["seconds"] / 1e9, rel=0.1)  # seconds are rounded


@pytest.mark.parametrize("arguments", [[], ["specforge=/nowhere"]])
def test_the_peer_bench_asks_for_specforge(arguments: list[str]) -> None:
    """CI has no SpecForge to time."""
    with pytest.raises(UserError, match=r"^specforge is '.*'; it takes the folder of the unpacked SpecForge"):
        bench_peer(["preset=tiny", *arguments])


def bench(*arguments: str, command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, "tools/bench.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["loss.selector_weight=nan", "drafter.kind=dflash2"], "loss.selector_weight is nan; it must be 0 or more"),
        (["loss.dpace_alpha=0.9"], "loss.dpace_alpha is 0.9; only loss.weighting=dpace has it"),
        (["loss.gamma=4", "loss.weighting=dpace"], "loss.gamma is 4.0; only loss.weighting=decay has it"),
        (
            ["loss.gamma=0.05"],
            "loss.gamma is 0.05; the last slots of a block would weigh nothing: it takes 0.1 or more",
        ),
        (["drafter.rope_theta=nan"], "drafter.rope_theta is nan; it must be a finite number above 0"),
        (["drafter.num_heads=0"], "drafter.num_heads is 0; it must be at least 1"),
        (["drafter.num_taps=0"], "drafter.num_taps is 0; it must be at least 1"),
        (["drafter.num_sliding_layers=0"], "drafter.sliding_window is 64; without drafter.num_sliding_layers"),
        (["trainer.activation_budget=1.5"], "trainer.activation_budget is 1.5; it takes 0 to 1"),
        (["trainer.activation_budget=0"], "trainer.activation_budget is 0.0 and trainer.compile false"),
        (
            ["trainer.flash_attention=true", "mesh.device=auto"],
            "flash-attn-4 takes bfloat16 and heads of 128 here, not float32 and 32",
        ),
        (["trainer.flash_attention=true", "mesh.device=cpu"], "flash-attn-4 takes Hopper GPUs, and the device is cpu"),
        (["optimizer.lr=inf"], "optimizer.lr is inf; it must be positive"),
        (["checkpoint.interval=0", "checkpoint.milestone_interval=5"], "milestones are checkpoints"),
        (["data.synthetic_length=0"], "data.synthetic_length is 0; it must be at least 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_job(parse(RunConfig, [f"config={CONFIGS / 'debug.yaml'}", *arguments], ""), 1)
