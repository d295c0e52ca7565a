"""A backend of NVIDIA Dynamo: `python -m atom.integrations.dynamo --model MODEL`.

engine    the engine's processes, and the client that sends them requests
request   Dynamo's requests, checked, as ours
reply     our updates as Dynamo's chunks
worker    the engine that Dynamo's runtime drives; the only module that imports Dynamo
"""
