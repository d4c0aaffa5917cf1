import importlib
import pkgutil
import subprocess
import sys

import mcore.modules


def test_all_is_complete():
    exported = mcore.modules.__all__
    assert len(exported) == len(set(exported))
    assert all(hasattr(mcore.modules, name) for name in exported)
    public = {
        name
        for name, value in vars(mcore.modules).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("mcore.")
    }
    assert public <= set(exported)


def test_every_module_lists_its_public_names():
    for info in pkgutil.walk_packages(mcore.modules.__path__, "mcore.modules."):
        if info.name.rpartition(".")[2].startswith("_"):
            continue
        module = importlib.import_module(info.name)
        assert all(hasattr(module, name) for name in module.__all__), info.name


def test_import_initialises_nothing():
    script = (
        "import sys, threading, torch\n"
        "import mcore.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert threading.active_count() == 1\n"
        "assert 'transformer_engine' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
