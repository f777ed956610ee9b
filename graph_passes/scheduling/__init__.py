"""When each collective is issued and waited for, and which units stay unsharded."""
