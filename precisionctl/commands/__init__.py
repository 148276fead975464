"""How the commands that write a checkpoint are planned, from what they are asked."""
