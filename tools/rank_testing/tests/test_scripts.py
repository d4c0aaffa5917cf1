"""Forked scripts end, print and die like separate interpreters."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rank_testing
from rank_testing.scripts import Script, run_script
from rank_testing.tests.living import is_living, wait_until

TOOLS = Path(rank_testing.__file__).parents[1]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("\nimport torch; torch.ones(2) @ torch.ones(3)", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_a_script_ends_as_it_does_under_python(ending: str, code: int) -> None:
    script = (
        "import atexit, os, signal, sys, threading\n"
        "atexit.register(print, 'at the end')\n"
        "sys.excepthook = lambda *error: print('raised', error[0].__name__)\n"
        "main = threading.current_thread()\n"
        "threading.Thread(target=lambda: (main.join(), print('thread'))).start()\n"
        f"print(__name__, threading.active_count())\n{ending}\n"
    )
    done = run_script(script)
    real = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (real.returncode, real.stdout)
    assert done.returncode == code
    assert done.stderr == real.stderr


def test_a_script_has_its_arguments_variables_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys, torch; print(sys.argv[1:], os.getcwd(), sorted(os.environ))"
    done = run_script(code, "a b", "", cwd=tmp_path, env={"ONLY": "1"})
    assert done.stdout == f"{['a b', '']} {tmp_path} ['ONLY']\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK_TESTING_EXAMPLE", "later")
    done = run_script("import os; print(os.getcwd(), os.environ['RANK_TESTING_EXAMPLE'])")
    assert done.stdout == f"{tmp_path} later\n"


def test_a_script_over_its_time_limit_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_script("print('begun', flush=True); import time; time.sleep(600)", timeout_s=2.0)
    assert caught.value.stdout in ("begun\n", "")


def test_a_running_script_is_read_and_killed() -> None:
    script = Script("import time; print('begun', flush=True); time.sleep(600)")
    script.wait_until_printed("begun\n")
    script.send(signal.SIGKILL)
    assert script.wait().returncode == -9


def test_scripts_end_with_the_process_that_started_them() -> None:
    code = (
        "import time\n"
        "from rank_testing.scripts import Script\n"
        "print(Script('import time; time.sleep(600)').pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        script = int(starter.stdout.readline())
        os.kill(script, 0)
        starter.kill()
    assert wait_until(lambda: not is_living(script), 60)
