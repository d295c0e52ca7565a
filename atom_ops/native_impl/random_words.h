// Philox4x32-7 of blocks of four tokens, as `atom_ops/ops/sampling/philox.py` defines the words.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int SPAN_BLOCKS = 64;  // that are computed together if one of them is needed

// The words of SPAN_BLOCKS blocks from `first` on.
inline void random_span(uint64_t key, uint32_t sequence, uint32_t position, uint32_t purpose, uint32_t first,
                        uint32_t (&words)[4][SPAN_BLOCKS]) {
    auto& [a, b, c, d] = words;
    for (int i = 0; i < SPAN_BLOCKS; ++i) a[i] = position, b[i] = purpose, c[i] = sequence, d[i] = first + i;
    uint32_t low_key = uint32_t(key), high_key = uint32_t(key >> 32);
    for (int round = 0; round < 7; ++round) {
        for (int i = 0; i < SPAN_BLOCKS; ++i) {
            const uint64_t low = a[i] * uint64_t(0xD2511F53), high = c[i] * uint64_t(0xCD9E8D57);
            a[i] = uint32_t(high >> 32) ^ b[i] ^ low_key;
            c[i] = uint32_t(low >> 32) ^ d[i] ^ high_key;
            b[i] = uint32_t(high);
            d[i] = uint32_t(low);
        }
        low_key += 0x9E3779B9;
        high_key += 0xBB67AE85;
    }
}

// needed[rows][blocks]: a flag for each of four tokens; where none of a span is set, words are 0.
inline void random_words(const int64_t* seeds, const int64_t* sequences, const int64_t* positions,
                         int64_t purpose, const uint32_t* needed, float* out, int64_t rows, int64_t blocks) {
    const int64_t spans = (blocks + SPAN_BLOCKS - 1) / SPAN_BLOCKS;
#pragma omp parallel for collapse(2) if (rows * blocks > 4096)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t span = 0; span < spans; ++span) {
            const int64_t first = span * SPAN_BLOCKS, place = row * blocks + first;
            const int count = int(blocks - first < SPAN_BLOCKS ? blocks - first : SPAN_BLOCKS);
            uint32_t any = 0;
            for (int i = 0; i < count; ++i) any |= needed[place + i];
            if (any == 0) {
                std::memset(out + 4 * place, 0, 16 * count);
                continue;
            }
            uint32_t words[4][SPAN_BLOCKS];
            random_span(uint64_t(seeds[row]), uint32_t(sequences[row]), uint32_t(positions[row]),
                        uint32_t(purpose), uint32_t(first), words);
            for (int i = 0; i < count; ++i)
                for (int lane = 0; lane < 4; ++lane) out[4 * (place + i) + lane] = float(words[lane][i]);
        }
}

}  // namespace
