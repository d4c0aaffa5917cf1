"""The command ``mcore-straggler``: shows and switches straggler controllers, without torch."""
