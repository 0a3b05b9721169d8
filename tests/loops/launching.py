"""Starting scripts as Accelerate's users do."""

from tests.launch import TORCHRUN, run_script


def run_with_torchrun(script, *arguments, num_processes=2, **options):
    """`torchrun --nproc_per_node NUM_PROCESSES SCRIPT ARGUMENTS`."""
    return run_script(TORCHRUN, *torchrun(num_processes), script, *arguments, **options)


def torchrun(num_processes):
    """The arguments before a script."""
    return "--standalone", "--nproc_per_node", num_processes


def run_with_accelerate(*arguments, **options):
    """`accelerate launch ARGUMENTS`."""
    return run_script("-m", "accelerate.commands.launch", *arguments, fresh=True, **options)
