"""What a step does to others than its module: it logs and prints, writes into files, and takes from iterators.

`calls` notes what is said to loggers and files, `streams` stands in for files and iterators while a step runs.
`opening` names files that a step opens itself, `opaque` objects of libraries that it changes.
"""
