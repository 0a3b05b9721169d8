"""Dividing a traced step over stages, and over phases where it optimizes several times.

`cutting` says where the step can be cut, `program` what each stage does of it. `flow` knows what events need of each
other, and gives them to stages where calls do not follow the order of these; `phases` finds the phases of a step.
"""
