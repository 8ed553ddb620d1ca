"""DDP's communication: buckets and communication hooks."""
