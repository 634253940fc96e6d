"""Training of a small Flax Llama on text with AdaHOP: data, model, loop and evaluation."""
