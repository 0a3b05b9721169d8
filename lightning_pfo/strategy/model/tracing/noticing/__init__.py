"""What is to be noticed while a step is traced, beside what functions of torch do with tracked tensors.

`held` knows the parameters and buffers that are used, changed or followed; `leaves` what functions are given, and
change; `applied` follows functions that are not torch's; `switches` notes what a step sets of modules;
`drawing` tells what draws random numbers.
"""
