"""The command ``mcore-straggler``, which looks at straggler controllers and needs no torch."""
