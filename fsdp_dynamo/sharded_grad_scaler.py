"""The name that ``torch.distributed.fsdp`` gives to the module of its gradient scaler."""

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
