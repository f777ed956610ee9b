"""State dicts of models and optimizers, and what ``torch.distributed.checkpoint`` needs of them.

Imports: ``core``, ``agreement``.
"""
