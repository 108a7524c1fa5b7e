"""Plain PyTorch models: the definition of what ironhorse must compute. Needs torch.

`gpt2` the model · `init` random weights · `hf` Hugging Face weights · `train` N optimizer steps · `bench` a timed step
"""
