"""Whether the other processes live, apart from torch.distributed.

Read `rank_watch` (who tells whom) first, then `calls` (the same outside runs) and `connection` (JSON over TCP).
`present` has the watch of the world that there is. `errors` says what a rank raises because of others. `stuck` ends
processes that wait for others in vain, and `exit` lets processes end cleanly.
"""
