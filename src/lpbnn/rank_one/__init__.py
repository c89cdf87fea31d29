"""Rank-one members: W_j = W * (s_j r_j^T), shared weights with two vectors per member and layer."""
