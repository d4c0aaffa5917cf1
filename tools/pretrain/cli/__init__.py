"""The command line, and the processes that it starts."""

# What a launcher and its ranks import in seconds, for those who fork them with it imported.
SLOW_IMPORTS = (
    "pretrain.cli.launch",
    "pretrain.cli.rank",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
    "mlflow.store.tracking.sqlalchemy_store",
)
