"""Text and conversations as token ids, by a checkpoint's own tokenizer and chat template, in a process with limits.

tokenizer.py   asks: which files go there, what it may take, and whether the answer can be
process.py     the process, from its start to its end; wire.py  what is said between the two
work.py        what runs in it: loads.py  the files as transformers' tokenizer; chat.py  conversations
"""
