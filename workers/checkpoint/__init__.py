"""From a checkpoint of any form to plain files: hub, directories, GGUF, configurations."""
