"""What every process shares: messages, configuration, sampling parameters, outputs, utilities.

It imports nothing else of ours, and no torch.
"""
