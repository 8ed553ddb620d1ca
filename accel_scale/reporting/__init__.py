"""Reports of a run: tables and the run summary."""
