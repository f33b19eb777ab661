"""Settings: who overrides whom, and errors that name the key, the value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from dflash_data.dataset import open_prepared
from dflash_data.synthetic import write_synthetic
from dflash_model.errors import UserError
from dflash_train.checkpoint import Position
from dflash_train.cli import parse
from dflash_train.config import MeshSection, RunConfig
from dflash_train.job import check_job
from dflash_train.mesh import make_split
from support.tiny import HYBRID

STEPS = "trainer.steps=5"


def given(*arguments: str) -> RunConfig:
    return parse(RunConfig, list(arguments), "usage")


def yaml(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return f"config={path}"


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = yaml(tmp_path, "trainer: {steps: 7, packs_per_step: 6}\ndata: {workers: 3}\n")
    config = given("data.workers=5", file, "run.dir=runs/x")
    assert (config.trainer.steps, config.trainer.packs_per_step) == (7, 6)
    assert (config.data.workers, config.data.prefetch) == (5, 8)
    assert (config.run.dir, config.config) == ("runs/x", file.removeprefix("config="))
    assert given(STEPS).data.workers == 2


def test_lists_and_nested_dicts(tmp_path: Path) -> None:
    assert given(STEPS, "data.sources=a.jsonl,b c.jsonl").data.sources == ["a.jsonl", "b c.jsonl"]
    assert given(STEPS, "data.sources=[a.jsonl]").data.sources == ["a.jsonl"]
    assert given(STEPS, "drafter.target_layer_ids=1,4").drafter.target_layer_ids == [1, 4]
    text = "trainer: {steps: 7}\ntarget: {config: {model_type: llama, rope: {theta: 5.0, types: [a, b]}}}\n"
    config = given(yaml(tmp_path, text), "target.config.vocab_size=99")
    assert config.target.config == {
        "model_type": "llama", "rope": {"theta": 5.0, "types": ["a", "b"]}, "vocab_size": 99,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.stps=3"], r"^trainer\.stps \(command line\) is not a key; the nearest is trainer\.steps "),
        (["trainer.steps=many"], r"^trainer\.steps: Value 'many' .* Integer"),
        (["trainer.steps=1.5"], r"^trainer\.steps: Value '1\.5' .* Integer"),
        ([STEPS, "dry_run"], r"^'dry_run' is not key=value"),
        ([STEPS, "trainer.lr=1"], r"^trainer.lr \(command line\) is not a key; the nearest is optimizer.lr"),
        ([STEPS, "config=gone.yaml"], r"^config is gone\.yaml; there is no such file"),
        ([STEPS, "data=x"], r"^data \(command line\) is not a key"),
        ([STEPS, "data.sources=[a"], r"data\.sources"),
        ([STEPS, "target.config={model_type: llama"], r"target\.config"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        given(*arguments)


@pytest.mark.parametrize("text", ["1e3", "007", "2026_10_02", "2026-10-02", "a: b: c", "x #1"])
def test_text_stays_as_typed(text: str) -> None:
    """A folder called 007 is not folder 7."""
    assert given(STEPS, f"run.dir={text}").run.dir == text


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^trainer\.stps \(\S*settings\.yaml\) is not a key; .* trainer\.steps "):
        given(yaml(tmp_path, "trainer: {stps: 7}\n"))
    for text, message in (("a: [", "it is not YAML"), ("- a\n", "it must hold sections of keys")):
        with pytest.raises(UserError, match=rf"^config is \S*settings\.yaml; {message}"):
            given(yaml(tmp_path, text), STEPS)


@pytest.mark.parametrize(("world", "target", "drafter"), [(2, 1, 1), (3, 2, 1), (4, 2, 2), (8, 5, 3), (16, 10, 6)])
def test_the_split_follows_the_number_of_ranks(world: int, target: int, drafter: int) -> None:
    split = make_split(MeshSection(), world)
    assert (split.num_targets, split.num_drafters, split.colocated) == (target, drafter, False)
    assert [split.target_rank(rank) for rank in range(world)] == [*range(target), *[None] * drafter]
    assert [split.drafter_rank(rank) for rank in range(world)] == [*[None] * target, *range(drafter)]
    assert [split.drafter_global(index) for index in range(drafter)] == list(range(target, world))


def test_stated_splits() -> None:
    one = make_split(MeshSection(), 1)
    assert (one.num_targets, one.num_drafters, one.colocated, one.world_size) == (1, 1, True, 1)
    both = make_split(MeshSection(colocated=True), 4)
    assert (both.num_targets, both.num_drafters, both.world_size) == (4, 4, 4)
    assert both.target_rank(3) == both.drafter_rank(3) == both.drafter_global(3) == 3
    for section in (MeshSection(target=6), MeshSection(drafter=2), MeshSection(target=6, drafter=2)):
        assert (make_split(section, 8).num_targets, make_split(section, 8).num_drafters) == (6, 2)
    assert make_split(MeshSection(target=6, drafter=2), None).world_size == 8


@pytest.mark.parametrize(
    ("section", "world", "message"),
    [
        (MeshSection(target=5, drafter=2), 8, r"^mesh\.target \(5\) \+ mesh\.drafter \(2\) must equal .* \(8,"),
        (MeshSection(target=8), 8, r"^mesh\.target \(8\)"),
        (MeshSection(drafter=9), 8, r"mesh\.drafter \(9\)"),
        (MeshSection(target=0), 8, r"^mesh\.target is 0; it must be at least 1"),
        (MeshSection(drafter=3, colocated=True), 8, r"^mesh\.drafter is 3; with mesh\.colocated=true"),
        (MeshSection(colocated=False), 1, r"^mesh\.colocated is false, but there is one rank"),
    ],
)
def test_contradictions_name_the_key(section: MeshSection, world: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_split(section, world)


def job(**changes: Any) -> RunConfig:
    """A toy job; ``section__key=value`` changes it."""
    config = given(
        STEPS, "trainer.packs_per_step=6", "data.seq_len=256", "data.anchors_per_pack=64", "drafter.block_size=8",
        "drafter.num_layers=3", "drafter.mask_token_id=130", "data.synthetic_documents=8", "data.path=/nowhere",
    )  # fmt: skip
    config.target.config = {"model_type": "qwen3_5_text", **HYBRID}
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(config, section), key, value)
    return config


def test_a_sound_job_follows_its_target() -> None:
    found = check_job(job(), 8)
    assert (found.split.num_targets, found.split.num_drafters, found.micro_steps) == (5, 3, 2)
    drafter = found.drafter
    assert (drafter.hidden_size, drafter.num_target_layers, drafter.vocab_size, drafter.head_dim) == (64, 8, 131, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__packs_per_step": 7}, r"^trainer\.packs_per_step is 7; .* multiple of 3 \(nearest: 6 or 9\)"),
        ({"trainer__packs_per_step": 2}, r"^trainer\.packs_per_step is 2; .* \(nearest: 3\)"),
        ({"data__seq_len": 100}, r"^data\.seq_len is 100; it must be a multiple of 128"),
        ({"data__anchors_per_pack": 20}, r"^data\.anchors_per_pack \(20\) x drafter\.block_size \(8\) must be"),
        ({"drafter__hidden_size": 96}, r"^drafter\.hidden_size is 96; .* so it must be 64"),
        ({"drafter__num_sliding_layers": 4}, r"^drafter\.num_sliding_layers is 4; it takes 0 to"),
        ({"data__synthetic_documents": 0}, r"^data\.path is /nowhere; there is no prepared dataset there"),
        ({"target__config": None}, r"^target\.path is missing; it takes a hub name"),
        ({"target__config": {"model_type": "nope"}}, r"^target\.config does not describe a model"),
        ({"target__dtype": "float16"}, r"^target\.dtype is 'float16'; it takes bfloat16 or float32"),
        ({"log__interval": 0}, r"^log\.interval is 0; it must be at least 1"),
        ({"evaluate__packs": -1}, r"^evaluate\.packs is -1"),
        ({"run__seed": -1}, r"^run\.seed is -1"),
        ({"loss__gamma": 0}, r"^loss\.gamma is 0"),
        ({"trainer__packs_per_step": 0}, r"^trainer\.packs_per_step is 0; it must be at least 1"),
        ({"drafter__init_from": "nowhere"}, r"^no drafter at nowhere"),
    ],
)
def test_an_unsound_job_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_job(job(**changes), 8)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_an_evaluation_holds_at_most_the_packs_asked_for(tmp_path: Path, world: int) -> None:
    """Whatever the split, the held-out rows of one evaluation are the same; the rest is empty."""
    write_synthetic(tmp_path / "data", documents=64, max_length=128, vocab_size=131, seed=0)
    found = check_job(job(evaluate__packs=2, data__seq_len=128), world)
    make = found.collator(open_prepared(tmp_path / "data", seq_len=128, vocab_size=512))
    assert len(make.heldout_plan) > 4
    items = found.schedule(make, Position())
    first = items.segments[0]
    packs = [make(items.item(index)) for index in range(first.first_index, first.first_index + first.count)]
    assert first.count % found.split.num_drafters == 0
    assert [bool((pack.doc_S >= 0).any()) for pack in packs] == [True, True, *[False] * (first.count - 2)]
