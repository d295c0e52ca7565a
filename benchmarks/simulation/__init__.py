"""A discrete-event simulation of many engines, and the roofline that tells how long a step takes.

decoder    the sizes of a model: weights, KV cache, operations
roofline   the time of a step on a device, with the collectives of a layout
engines    engine cores whose workers only take time
requests   arrivals, lengths and shared prefixes
simulate   one clock, one heap of events
"""
