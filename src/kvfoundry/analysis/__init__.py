"""What a model does with its rows: which heads retrieve. `heads.measure_heads` measures, `command` is the command line.

Empty, so that the command line starts without torch.
"""
