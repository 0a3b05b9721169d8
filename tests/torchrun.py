"""`torchrun OPTIONS SCRIPT ARGUMENTS`, but its processes are forks of this one instead of new interpreters.

Its agents, rendezvous and environment variables are torch's own; only importing all anew in each process is left out.
"""

import runpy
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch


def start(unbuffered, script, *arguments):
    """Be what `python -u SCRIPT ARGUMENTS` is."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def with_forks(config, entrypoint):
    config.start_method = "fork"
    return elastic_launch(config, start)


run.elastic_launch = with_forks
run.main(sys.argv[1:])
