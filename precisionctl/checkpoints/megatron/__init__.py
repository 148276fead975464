"""What all of Megatron's containers share: names and order of parameters, arguments, FP8 state, what a run keeps."""
