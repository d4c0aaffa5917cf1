"""The command line, and the processes that it starts."""

# Modules that take seconds to import, for test servers that fork launchers and ranks.
SLOW_IMPORTS = (
    "pretrain.cli.launch",
    "pretrain.rank",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
    "mlflow.store.tracking.sqlalchemy_store",
)
