"""What a run would enqueue on a GPU: recorded on a CPU, checked for order, and given a clock."""
