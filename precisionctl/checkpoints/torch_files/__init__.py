"""PyTorch's own files, read and written without torch.load and without the classes that they name: archives of
torch.save (`torch_zip*.py`), with DTensors and Transformer Engine's tensors in them, and `.metadata` of its distributed
checkpoints (DCP). They are no containers: several containers are made of them."""
