"""Whether the other processes live, apart from torch.distributed.

Read `rank_watch` (who tells whom) first, then `calls` (the same outside runs) and `connection` (JSON over TCP). `errors`
says what a rank raises because of others, `stuck` ends a process that waits for them in vain, and `exit` lets processes end cleanly.
"""
