"""Model parallelism on torch's device meshes: tensor, pipeline and sequence parallelism beside data parallelism."""
