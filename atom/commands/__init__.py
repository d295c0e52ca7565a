"""Commands besides `atom-launch`: `atom doctor`, and the plan that `--plan` prints."""
