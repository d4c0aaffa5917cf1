import importlib.metadata
import subprocess
import sys

import pytest

from mcore.observe.settings.extras import is_extra_installed, require_extra


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_found)
    assert not is_extra_installed("comet")
    with pytest.raises(ModuleNotFoundError) as caught:
        require_extra("comet", "comet_project")
    assert str(caught.value) == (
        'comet_project needs comet-ml, which is not installed: pip install "mcore-observe[comet]"'
    )


def test_any_distribution_with_the_library_will_do(monkeypatch):
    def only_skinny(name):
        if name != "mlflow-skinny":
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", only_skinny)
    assert is_extra_installed("mlflow")
    require_extra("mlflow", "mlflow_experiment")


def test_every_extra_is_declared_by_the_distribution():
    from mcore.observe.settings.extras import _DISTRIBUTIONS

    declared = importlib.metadata.metadata("mcore-observe").get_all("Provides-Extra")
    assert set(declared) == set(_DISTRIBUTIONS)


def test_unknown_extra():
    with pytest.raises(ValueError, match="unknown extra 'excel'"):
        is_extra_installed("excel")


def test_import_brings_no_optional_library_and_starts_nothing():
    code = (
        "import sys, threading, torch, signal;"
        "torchs = set(sys.modules);"  # torch.cuda takes pynvml where there is one
        "import mcore.observe;"
        "optional = {'tensorboard', 'mlflow', 'wandb', 'comet_ml', 'pynvml', 'nvtx'};"
        "print(sorted(optional & set(sys.modules) - torchs), threading.active_count(),"
        " torch.distributed.is_initialized(), torch.cuda.is_initialized(),"
        " sys.excepthook is sys.__excepthook__, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["[]", "1", "False", "False", "True", "True"], done.stderr
