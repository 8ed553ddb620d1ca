"""Links between devices, and the cost of collectives on them."""
