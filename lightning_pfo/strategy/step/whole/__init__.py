"""The end of a step on the whole batch, `loss_over="batch"`: for losses that compare samples with each other.

`joining` puts what microbatches have come to in the order of the batch, with the help of `order`; `end` runs the rest
of the step on it once, on the last stage, and hands each microbatch its gradients.
"""
