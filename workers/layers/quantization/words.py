"""4-bit integers in words of 32 bits, as checkpoints pack them, and in bytes, as `GroupINT4` does.

    word   0x76543210: numbers 0 to 7, the first in the lowest bits
    AWQ    0x75316420: even numbers first
    byte   low nibble: even input, high nibble: odd

All functions map [rows, columns] and run on any device.
"""

import torch
from torch import Tensor

STRAIGHT = (0, 1, 2, 3, 4, 5, 6, 7)
"""Nibble of each of the eight numbers of a word of 32 bits."""
EVEN_FIRST = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of each number in AWQ's order: even numbers first."""
_NIBBLE = 15
_ONES = 0x11111111


def rows_of_words(words: Tensor, nibbles: tuple[int, ...] = STRAIGHT) -> Tensor:
    """int32 [R, C] to uint8 [8 R, C]: each word has eight numbers of a column."""
    numbers = torch.empty((words.shape[0], 8, words.shape[1]), dtype=torch.uint8, device=words.device)
    for row, nibble in enumerate(nibbles):
        numbers[:, row] = (words >> (4 * nibble)) & _NIBBLE
    return numbers.flatten(0, 1)


def pairs_of_words(words: Tensor) -> Tensor:
    """int32 [R, C] to pairs, uint8 [R, 4 C]: each word has eight numbers of a row."""
    return words.contiguous().view(torch.uint8)


def pairs_of_numbers(numbers: Tensor) -> Tensor:
    """uint8 [..., 2 C], 0 to 15, to pairs [..., C]."""
    return numbers[..., 0::2] | (numbers[..., 1::2] << 4)


def numbers_of_pairs(pairs: Tensor) -> Tensor:
    """uint8 [..., C] to numbers [..., 2 C], 0 to 15."""
    return torch.stack((pairs & _NIBBLE, pairs >> 4), -1).flatten(-2)


def one_more(words: Tensor) -> Tensor:
    """Adds one to each number of a word, as whole words, as it was subtracted."""
    return words + _ONES


def unsigned(pairs: Tensor) -> Tensor:
    """Pairs in two's complement, -8 to 7, as pairs of 0 to 15 with 8 for zero."""
    return pairs ^ 0x88
