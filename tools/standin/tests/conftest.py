from standin.plugin import accelerator_fixture, device_fixture  # noqa: F401
