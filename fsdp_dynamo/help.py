"""The former name of ``fsdp_dynamo.troubleshooting``: ``python -m fsdp_dynamo.help``."""

import sys

from fsdp_dynamo.troubleshooting import main

if __name__ == "__main__":
    sys.exit(main())
