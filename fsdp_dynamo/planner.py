"""The former name of ``fsdp_dynamo.estimator``, kept for scripts that use it."""

import sys

from fsdp_dynamo.estimator import *  # noqa: F403
from fsdp_dynamo.estimator import Setup as Setup
from fsdp_dynamo.estimator import __all__ as __all__
from fsdp_dynamo.estimator import best_of as best_of
from fsdp_dynamo.estimator import text_of as text_of

if __name__ == "__main__":
    from fsdp_dynamo.estimator.__main__ import main

    sys.exit(main())
