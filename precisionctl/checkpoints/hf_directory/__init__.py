"""What a directory of Hugging Face's is made of, each part for itself: files of weights and the tensors in them, how
codes are said to be encoded, config.json, the files beside it, and the Hub that it is downloaded from.

Other containers need some of it too, so nothing here knows one; the container is `checkpoints/huggingface.py`.
"""
