"""The text of ``--data``: its files, tokens and token cache."""
