"""Plain PyTorch models: the definition of what ironhorse must compute. Needs torch.

`gpt2`, `moe` the models · `init`, `init_moe` random weights · `hf` Hugging Face weights of GPT-2 · `train` N optimizer
steps · `bench` a timed step
"""
