"""Links between devices, and what collectives cost on them."""
