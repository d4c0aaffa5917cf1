from standin.plugin import accelerator, device  # noqa: F401
