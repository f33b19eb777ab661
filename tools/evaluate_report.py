"""What tools/evaluate.py says: acceptance in every cut, for people and as JSON."""

import math
from typing import Any

from dflash_train.acceptance import Acceptance, Rounds, by_context, by_position

FEW = 10  # prompts, below which a bootstrap says nothing
DISAGREEMENT = 0.1  # of loop and replay; in bf16 single texts part, whole sets differ by far less


def summary(texts: list[Rounds], domains: list[str], block_size: int) -> dict[str, Any]:
    """Acceptance lengths in every cut."""
    whole = Acceptance.of(texts)
    by_domain = {
        name: Acceptance.of([text for text, domain in zip(texts, domains, strict=True) if domain == name])
        for name in sorted(set(domains))
    }
    return {
        "prompts": len(texts),
        "acceptance_pooled": whole.pooled,
        "acceptance_mean": whole.mean,
        "interval": list(whole.interval()) if len(texts) >= FEW else None,
        "tokens": int(whole.tokens.sum()),
        "rounds": int(whole.rounds.sum()),
        "domains": {
            name: {"pooled": a.pooled, "mean": a.mean, "prompts": len(a.tokens)} for name, a in by_domain.items()
        },
        "positions": by_position(texts, block_size),
        "context": by_context(texts),
    }


def print_replay(report: dict[str, Any], dtype: str) -> None:
    """Of stored answers, for people."""
    print(
        f"\n{report['prompts']} stored answers, {dtype}\n  {report['name']} {report['acceptance_pooled']:.3f}"
        f" {_interval(report)} pooled, {report['acceptance_mean']:.3f} mean of prompts ({report['tokens']} tokens in"
        f" {report['rounds']} rounds)"
    )
    _print_cuts(report)


def _interval(report: dict[str, Any]) -> str:
    if report["interval"] is None:
        return "(too few prompts for an interval)"
    return "(95 % interval over prompts {:.3f} to {:.3f})".format(*report["interval"])


def print_local(report: dict[str, Any], dtype: str) -> None:
    """Of decoded answers, for people."""
    print(f"\ntemperature {report['temperature']:g}, {report['prompts']} prompts, {dtype}")
    print(
        f"  loop    {report['acceptance_pooled']:.3f} {_interval(report)} pooled, {report['acceptance_mean']:.3f}"
        f" mean of prompts ({report['tokens']} tokens in {report['rounds']} rounds, {report['target_forwards']} target"
        " forwards with prefills)"
    )
    if "replay" in report:
        again = report["replay"]
        if abs(again["pooled"] / report["acceptance_pooled"] - 1) > DISAGREEMENT:
            print("  WARNING: loop and replay disagree; one of them does not use the drafter as it was trained")
        print(
            f"  replay  {again['pooled']:.3f} pooled, {again['mean']:.3f} mean of prompts; the same rounds in"
            f" {again['equal_texts']} of {report['prompts']} texts"
        )
    _print_cuts(report)
    if report.get("speed_up"):
        rounds = max(report["rounds"], 1)
        draft, verify = (report[f"{name}_seconds"] / rounds * 1e3 for name in ("draft", "verify"))
        plain = 1e3 / report["plain_tokens_per_second"]
        print(
            f"  a round costs {draft:.1f} ms draft + {verify:.1f} ms verify, a plain token {plain:.1f} ms: drafting"
            f" pays above an acceptance length of {(draft + verify) / plain:.2f}, here, one text at a time"
        )
        print(
            f"  speed-up {report['speed_up']:.2f}x: {report['tokens_per_second']:.1f} against"
            f" {report['plain_tokens_per_second']:.1f} tokens/s"
        )
    if "texts_equal" in report:
        print(f"  texts equal to those without drafting: {report['texts_equal']} of {report['prompts']}")
        for line in report["divergences"][:5]:
            print(f"    {line}")


def _print_cuts(report: dict[str, Any]) -> None:
    for name, value in report["domains"].items():
        print(f"  domain {name}: {value['pooled']:.3f} ({value['prompts']} prompts)")
    for row in report["context"]:
        print(f"  context of {row['from']} tokens and more: {row['pooled']:.3f} ({row['rounds']} rounds)")
    print("  slot      " + " ".join(f"{row['slot']:>5}" for row in report["positions"]))
    for name, label in (("accepted", "accepted  "), ("given_previous", "given prev")):
        print(
            f"  {label}"
            + " ".join("    -" if row[name] is None else f"{row[name]:5.2f}" for row in report["positions"])
        )


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """JSON has no NaN: what could not be measured is null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
