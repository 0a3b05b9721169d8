"""Whether the other processes live, apart from torch.distributed.

Read `rank_watch` (who tells whom) first, then `connection` (JSON over TCP). `exit` lets processes end cleanly.
"""
