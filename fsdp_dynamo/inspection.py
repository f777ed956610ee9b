"""``inspect_graphs`` and its command: ``python -m fsdp_dynamo.inspection --module PKG:FN``."""

import sys

from fsdp_dynamo.observe.inspection import Inspection, Listing, inspect_graphs

__all__ = ["Inspection", "Listing", "inspect_graphs"]

if __name__ == "__main__":
    from fsdp_dynamo.observe.inspection.__main__ import main

    sys.exit(main())
