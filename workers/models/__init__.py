"""One file per model family, named as its `model_type`; `registry` finds it by that name."""
