"""What happens when memory runs out or a collective hangs."""
