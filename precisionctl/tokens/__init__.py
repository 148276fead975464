"""Tokenize text and conversations with a checkpoint's own tokenizer and chat template, in a process with limits.

tokenizer.py        Tokenizer, the client: sends files and texts, sets limits, checks replies
process.py          starts and ends the process
server.py           the process's main function
safe_tokenizer.py   loads transformers' tokenizer there
samples.py          conversations and completions, the samples that are not plain text
chat.py             conversations as the chat template prints them
wire.py, limits.py  the protocol on the process's pipes, and its limits
"""
