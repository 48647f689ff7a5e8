"""`fusedring doctor`: healthy machines, broken ones, and wrong results."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from fusedring.bench.self_test import SelfTest
from fusedring.cli import doctor, main
from fusedring.group.groups import communicator_of
from fusedring.group.spawn import RanksFailedError
from fusedring.plan.policy import rules_on_gpus

DOCTOR = [sys.executable, "-m", "fusedring", "doctor"]


def test_a_healthy_machine():
    done = subprocess.run([*DOCTOR, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert findings["ok"]
    assert findings["engine"] == "host"
    assert findings["auto"][0] == json.loads(json.dumps(asdict(doctor.autos(0)[0])))
    assert findings["self_test"]["wrong"] == 0
    assert findings["self_test"]["seconds"] < 100
    names = [check["name"] for check in findings["checks"]]
    assert names == [
        "python",
        "torch",
        "triton",
        "matplotlib",
        "GPUs",
        "processor",
        "shared memory",
        "engine",
        "algorithm",
        "self-test",
    ]


def test_what_auto_stands_for_is_what_launches_follow(monkeypatch, capsys):
    """The policy's own words, in JSON and in the table, for this machine and for GPUs that it may have."""
    monkeypatch.setattr(doctor, "spawn", lambda *_, **__: [SelfTest(2, 1.0, 1000, 0, 1.0, 1.0, 1.0)])
    engine = communicator_of().engine_for("auto", torch.device("cpu"))
    for count in (0, 1, 2, 4):
        monkeypatch.setattr(doctor, "usable_gpus", lambda count=count: count)
        assert main(["doctor", "--json"]) == 0
        findings = json.loads(capsys.readouterr().out)
        assert findings["engine"] == ("triton" if count else "host")
        host, *on_gpus = findings["auto"]
        assert host["engine"]["engine"] == engine.name
        assert host["algorithms"] == [asdict(rule) for rule in engine.rules]
        meshes = {0: [], 1: [True], 2: [True], 4: [False, True]}[count]
        wanted = [[asdict(rule) for rule in rules_on_gpus(count, full_mesh=mesh)] for mesh in meshes]
        assert [auto["algorithms"] for auto in on_gpus] == wanted
        assert main(["doctor"]) == 0
        table = "".join(capsys.readouterr().out.translate(dict.fromkeys(map(ord, "│ \n"))).split())
        for auto in findings["auto"]:
            for words in (auto["tensors"], auto["engine"]["why"], *(rule["why"] for rule in auto["algorithms"])):
                assert words.replace(" ", "") in table, words


def forbid_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_without_shared_memory_it_exits_with_1_and_says_what_to_do():
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=120, check=False, preexec_fn=forbid_files)
    assert done.returncode == 1
    assert "ulimit -f unlimited" in done.stdout
    assert "something is broken" in done.stdout


def test_wrong_results_and_failing_ranks_are_broken(monkeypatch, capsys):
    wrong = SelfTest(2, 1.0, 1000, 3, 1.0, 1.0, 1.0)
    monkeypatch.setattr(doctor, "spawn", lambda *_, **__: [wrong])
    assert main(["doctor"]) == 1
    assert "3 of 1,000 elements wrong" in " ".join(capsys.readouterr().out.split())

    def fail(*_, **__):
        raise RanksFailedError("rank 1: PeerLostError [remedy]")

    monkeypatch.setattr(doctor, "spawn", fail)
    assert main(["doctor", "--json"]) == 1
    (check,) = (c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "self-test")
    assert check["status"] == "broken"
    assert "rank 1: PeerLostError [remedy]" in check["finding"]


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.0", "broken"), ("2.9.1+cu126", "broken"), ("2.12.0", "note"), ("2.13.1+cpu", "ok"), ("3.0.0a0", "note")],
)
def test_versions_of_torch(version, status):
    assert doctor._torch(version).status == status


def test_triton_may_be_missing():
    assert doctor._triton(None).status == "note"
    assert doctor._triton("3.7.1").status == "ok"
