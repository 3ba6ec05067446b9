"""Entropy coding of uint8 symbols."""
