"""Files from strangers, read by allow-list and with bounds: nothing in them is run. Also the writer of pickles."""
