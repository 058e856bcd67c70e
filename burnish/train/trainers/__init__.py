"""Supervised and preference training, on the compiled steps, scores, optimizers, checkpoints and sinks of reinforcement learning.

`objective` says what is learned from a row, `batches` lays rows out, `policy` is the model that learns, `trainer` the loop; `named` has the
trainers that users meet.
"""
