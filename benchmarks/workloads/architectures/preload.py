"""Imported once before ranks are forked: the parts of packages that all models need."""

from __future__ import annotations

import contextlib
import importlib

NAMES = (
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "transformers.loss.loss_utils",
)

for _name in NAMES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
