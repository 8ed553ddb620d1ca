"""Pipeline parallelism: stages, schedules, tied embeddings."""
