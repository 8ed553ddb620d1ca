"""What is kept for the backward pass: a forward pass on tensor sizes alone, layer by layer."""
