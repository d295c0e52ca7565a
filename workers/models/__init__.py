"""One file for each model family, named as its `model_type`; `registry` finds them."""
