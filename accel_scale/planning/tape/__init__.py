"""What the backward pass keeps: a forward pass on tensor sizes alone, layer by layer."""
