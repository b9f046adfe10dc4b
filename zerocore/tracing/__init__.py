"""Where the time of training goes: traces of ranks, and what can be said of them."""
