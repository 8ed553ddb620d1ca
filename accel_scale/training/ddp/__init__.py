"""What DDP sends: buckets and communication hooks."""
