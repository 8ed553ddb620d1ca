"""Tables that planning and training share: optimizers, hardware, names. No torch."""
