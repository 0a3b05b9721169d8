"""What calls of a traced step return, in form, and which of its sizes depend on values.

`outline` finds what a unit returns, `remembered` keeps that, `inside` follows what happens in a call meanwhile.
`selecting` gives sizes that depend on values, and `varying` knows what depends on these.
"""
