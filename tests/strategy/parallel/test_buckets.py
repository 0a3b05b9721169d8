"""Gradients are averaged over replicas in buckets, while the pipeline goes on, and are those of one device."""

from pathlib import Path

from tests.launch import run_script


def test_gradients_of_replicas_are_averaged_in_buckets_and_sums_can_be_precise():
    run_script(Path(__file__).parents[1] / "scripts" / "buckets.py")
