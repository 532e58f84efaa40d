"""`heterocache calibrate` on a real engine leaves a profile with all that was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import ENGINE_ENVIRONMENT, engine_arguments
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_profile import CostProfile

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
def test_a_profile_says_what_prefills_do_to_decodes(tmp_path: Path) -> None:
    """Prompts longer than a step's tokens, beside batches of up to 16 that decode."""
    directory = write_checkpoint("dense", tmp_path)
    out = tmp_path / "profile.json"
    sizes = {"max_model_len": 1024, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    arguments = json.dumps(engine_arguments("dense") | sizes)
    command = [sys.executable, "-m", "hetero_connector.cli", "calibrate", str(directory)]
    command += ["--out", str(out), "--engine-args", arguments]
    done = subprocess.run(
        command, env=os.environ | ENGINE_ENVIRONMENT, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    profile = CostProfile.read(out)
    assert profile.compute_error is not None
    assert Tier.DRAM in profile.load
    assert profile.interference is not None
    assert profile.interference_error is not None
    assert profile.interference_error.samples >= 50
    # 256 tokens of a prompt hold up a decode for longer than one more decode would.
    assert profile.interference.delay_s(256, 256 * 128, 1) > profile.interference.decode_s
