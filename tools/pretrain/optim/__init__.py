"""AdamW over whole or sharded parameters."""
