"""Places of collectives: where each is issued and waited for, and which units stay unsharded."""
