"""The examples, started by torchrun on 2 ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

# Runs an example, and leaves what each rank has at the end.
DRIVER = """
import importlib, os, sys
import torch
sys.path.insert(0, {examples!r})
model = importlib.import_module({name!r}).main(sys.argv[1:])
torch.save(model.module.state_dict(), {folder!r} + "/rank" + os.environ["RANK"] + ".pt")
"""


@pytest.fixture
def train() -> ModuleType:
    return load("train")


@pytest.fixture
def finetune() -> ModuleType:
    return load("finetune")


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run(name: str, folder: Path, *arguments: object) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The lines that say a loss, and the weights, which are the same on both ranks."""
    folder.mkdir(exist_ok=True)
    driver = folder / "driver.py"
    driver.write_text(DRIVER.format(examples=str(EXAMPLES), name=name, folder=str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(driver)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (torch.load(folder / f"rank{rank}.pt") for rank in range(2))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    return [line for line in done.stdout.splitlines() if "loss" in line], ours


def losses(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.slow  # starts two ranks three times
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    checkpoint = tmp_path / "run.pt"
    whole, weights = run("train", tmp_path / "whole", "--epochs", 2, "--batch", 128)
    first, _ = run("train", tmp_path / "first", "--epochs", 1, "--batch", 128, "--checkpoint", checkpoint)
    # The first epoch is in the checkpoint, once bare and once as a wrapper would have written it.
    saved = torch.load(checkpoint)
    assert not any(key.startswith("module.") for key in saved["model"])
    assert int(saved["average"]["n_averaged"]) == len(first) == 4
    torch.save({**saved, "model": {f"module.{key}": value for key, value in saved["model"].items()}}, checkpoint)
    second, resumed = run("train", tmp_path / "second", "--epochs", 2, "--batch", 128, "--resume", checkpoint)
    assert first + second == whole
    assert all(torch.equal(resumed[key], weights[key]) for key in weights)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_checkpoints_load_with_and_without_prefix(train, prefix):
    source, target = train.make_model(), train.make_model()
    state = {prefix + key: value for key, value in source.state_dict().items()}
    train.load_weights(target, state)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert all(key.startswith(prefix) for key in state)


def test_training_in_float16_with_a_scaler(tmp_path):
    lines, _ = run("train", tmp_path, "--epochs", 1, "--accumulate", 3, "--precision", "float16", "--wire", "fp16")
    assert len(lines) == 11
    assert losses(lines)[-2] < losses(lines)[0] - 0.05  # the last step has the loss of 2 forwards only


@pytest.mark.slow  # twice
def test_fine_tuning_changes_the_adapters_alone(finetune, tmp_path):
    checkpoint = tmp_path / "adapters.pt"
    lines, weights = run("finetune", tmp_path / "first", "--steps", 21, "--checkpoint", checkpoint)
    assert losses(lines)[-1] < 0.2 * losses(lines)[0]
    assert {key for key in weights if ".layer." not in key} == torch.load(checkpoint).keys()
    backbone = finetune.make_backbone().state_dict()
    for key in backbone:
        assert torch.equal(weights[key.replace(".", ".layer.")], backbone[key])
    _, resumed = run("finetune", tmp_path / "resumed", "--steps", 0, "--resume", checkpoint)
    assert all(torch.equal(resumed[key], weights[key]) for key in weights)
