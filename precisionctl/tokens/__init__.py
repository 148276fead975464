"""Tokenize text and conversations with a checkpoint's own tokenizer and chat template, in a process with limits.

tokenizer.py        Tokenizer, the client: sends files and texts, sets limits, checks replies
process.py          starts and ends the process
server.py           the process's main function
safe_tokenizer.py   loads transformers' tokenizer there
chat.py             conversations
wire.py, limits.py  the protocol on the process's pipes, and its limits
"""
