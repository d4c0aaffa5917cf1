"""Folders of Hugging Face: safetensors with an index, in the names of transformers."""
