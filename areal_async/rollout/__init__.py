"""Rollouts: from a prompt to finished samples, token ids in and out."""
