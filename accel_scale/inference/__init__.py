"""Using what a run has saved: loading a folder, whole or adapter, and talking to it."""
