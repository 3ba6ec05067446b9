"""The numbers in the value hash's definition, see ``lcjax.hashing``."""

WEYL = 0x9E3779B1
START = 0x7F4A7C15
LANE = 0x6C62272E
MUL1 = 0x7FEB352D
MUL2 = 0x846CA68B
