"""State dicts of models and optimizers, and support for ``torch.distributed.checkpoint``."""
