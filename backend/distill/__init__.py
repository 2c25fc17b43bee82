"""Training a draft head on a model's own answers: what `tidegate distill-draft` runs."""
