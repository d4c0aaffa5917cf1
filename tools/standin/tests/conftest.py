from standin.plugin import accelerator_fixture, device_fixture, on_each_device  # noqa: F401
