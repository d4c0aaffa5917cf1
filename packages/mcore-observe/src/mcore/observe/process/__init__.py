"""The process: its rank in what it logs, and the status with which it ends."""
