"""The driver of RL: its rewards, and the modules that it loads in addition to torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rank_testing.scripts import run_script

DRIVER = Path(__file__).parents[1] / "rl_driver.py"
RUN = "import runpy, sys; sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
# A module that is None cannot be imported, like Megatron-LM on a node without a GPU.
LOADED = """
import json, sys
sys.modules.update(dict.fromkeys(("megatron", "transformer_engine", "apex", "pynvml")))
import torch, torch.distributed, torch.distributed.device_mesh
before = set(sys.modules)
import examples.rl_driver
print(json.dumps([len(before), sorted(set(sys.modules) - before), torch.cuda.is_initialized()]))
"""


WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_the_workers_score_every_prompt_and_the_driver_needs_no_group() -> None:
    prompts = ["ab", "xyz", "q"]
    ended = run_script(RUN, str(DRIVER), "--workers", "4", "--tp", "2", *prompts, env=WITHOUT_GPU)
    assert ended.returncode == 0, ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert first.endswith("ProcessGroups(empty)")
    assert lines == ["ab: 195", "xyz: 363", "q: 113"]
    assert run_script(RUN, str(DRIVER), "--workers", "3", "--tp", "2").returncode == 2


def test_the_driver_loads_few_modules_in_addition_to_torch() -> None:
    words = [sys.executable, "-c", LOADED]
    ended = subprocess.run(words, env=WITHOUT_GPU, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    num_before, loaded, has_cuda = json.loads(ended.stdout)
    assert not has_cuda
    assert {"mcore.versioning", "mcore.parallel"} <= set(loaded)
    assert not [name for name in loaded if name.startswith(("mcore.modules", "mcore.observe"))]
    packages = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert packages <= {"mcore", "examples", "xxhash", "packaging", "torch"}
    # Its start takes about as long as its share of the modules.
    assert len(loaded) < num_before / 5
