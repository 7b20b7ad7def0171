"""The values that the options of a search may have, for the search and for the command lines that set them.

Free of TensorFlow, so that a command refuses a flag before it loads anything.
"""

from lingvo_moe.core.config import checks

# A beam of 1000 takes seconds a line with the smallest of models; masks grow with its square.
BEAM_SIZE = checks.Integer(1, 1000)
# Tokens of a line or a translation: so many bytes, 64 for each piece, are still an int32.
LENGTH = checks.Integer(1, 1_000_000)
# Usual are 0 to 1; with 10 the norm of long lines is still a float32.
LENGTH_ALPHA = checks.Number(0, 10)
