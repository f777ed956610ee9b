"""Fully Sharded Data Parallel that PyTorch's compiler understands."""

from fsdp_dynamo.version import __version__, check_distributed, check_torch

check_torch()  # before any import that an older torch would fail in a way of its own
check_distributed()

# ruff: noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import fsdp_dynamo.api
import fsdp_dynamo.graph_mode.backends  # registers the backends of torch.compile
import fsdp_dynamo.state_dict.dcp  # noqa: F401  # lets torch.distributed.checkpoint know our models
from fsdp_dynamo import checkpoint
from fsdp_dynamo.api import (
    BackwardPrefetch,
    CollectivePrecision,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from fsdp_dynamo.comm.watchdog import set_abort_on_divergence
from fsdp_dynamo.core.optimizers import step_on_shards
from fsdp_dynamo.errors import (
    CheckpointError,
    DivergenceError,
    FSDPError,
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    RankFailedError,
    UnsupportedError,
)
from fsdp_dynamo.events import Event, EventLog, record_events
from fsdp_dynamo.fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType
from fsdp_dynamo.graph_mode.planning import PlanLog, record_plans
from fsdp_dynamo.health.flight_recorder import record_flight
from fsdp_dynamo.observe.explain import Explanation, explain
from fsdp_dynamo.observe.inspection import Inspection, inspect_graphs
from fsdp_dynamo.observe.warmup import warmup
from fsdp_dynamo.sharded_grad_scaler import ShardedGradScaler
from fsdp_dynamo.wrap.composable import FSDPModule, fully_shard, replicate
from fsdp_dynamo.wrap.fsdp2_methods import (
    GradientReductionHandle,
    UnshardHandle,
    register_fsdp_forward_method,
)
from fsdp_dynamo.wrap_policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CollectivePrecision",
    "CustomPolicy",
    "DivergenceError",
    "Event",
    "EventLog",
    "Explanation",
    "FSDPError",
    "FSDPModule",
    "FSDPStateError",
    "FSDPTypeError",
    "FSDPValueError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "Inspection",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PlanLog",
    "RankFailedError",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "UnshardHandle",
    "UnsupportedError",
    "WrapPolicy",
    "__version__",
    "always_wrap_policy",
    "checkpoint",
    "explain",
    "fully_shard",
    "inspect_graphs",
    "lambda_auto_wrap_policy",
    "record_events",
    "record_flight",
    "record_plans",
    "register_fsdp_forward_method",
    "replicate",
    "set_abort_on_divergence",
    "size_based_auto_wrap_policy",
    "step_on_shards",
    "transformer_auto_wrap_policy",
    "warmup",
]
