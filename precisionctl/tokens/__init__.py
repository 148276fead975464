"""Tokenize text and conversations with a checkpoint's own tokenizer and chat template, in a process with limits.

tokenizer.py   Tokenizer, the client: sends files and texts, sets limits, checks replies
process.py     starts and ends the process        wire.py   the protocol on its pipes       limits.py  its limits
work.py        the process's main function        loads.py  loads transformers' tokenizer   chat.py    conversations
"""
