"""The member axis: expand a batch to members, run them, gather their outputs."""
