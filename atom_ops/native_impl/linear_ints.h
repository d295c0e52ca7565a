// Linear layers with weights of integers in groups of inputs: code * scale + offset.
//
// A result adds, for each group, scale * (sum of x * code) and offset * (sum of x), in float32. Codes are
// multiplied as they are, in bfloat16, which holds them exactly. A weight [O, I] is packed in panels of LANES
// outputs, as in `linear.h`. In each word of 32 bits even inputs are in the low half, odd ones in the high
// one; a half has, from its lowest bits on,
//
//     of 4-bit codes        four; without offsets, they are stored plus 8
//     of 6-bit codes, plus 32; eight pairs are in three words:
//                           the first and second, and four bits of the seventh
//                           the third and fourth, and four bits of the eighth
//                           the fifth and sixth, and two bits of the seventh, and of the eighth
//
//     words[output / LANES][pairs' words][output % LANES]      uint32; of 8-bit codes uint16, a pair each
//     terms[output / LANES][group][0 or 1][output % LANES]     the scale, and the offset: float32; float16,
//                                                              1024 times as much; or int8
//     units[output / LANES][block][0 or 1][output % LANES]     float16: what int8 terms are multiplied by

#pragma once

#include "linear.h"

#include <omp.h>
#include <vector>

namespace {

constexpr int64_t TILE_PAIRS = 128;  // of a panel that are decoded at once; a group has no more
constexpr int64_t FEWEST_PAIRS = 8;  // of a group
constexpr int FEW_ROWS = 4;  // whose codes are decoded as they are multiplied
constexpr int64_t AHEAD_TERMS = 256;  // bytes of a panel's terms, between what is fetched and what is read

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <typename T> struct IntLinear : Rows<T> {
    const Words* words;
    const void* terms;
    const uint16_t* units;
    int64_t group;  // pairs
    int64_t num_groups;
    int64_t block;  // groups that share units, a power of 2; 0 without them
    int bits;
    bool has_offsets, wide_terms;

    float unit() const { return wide_terms || block > 0 ? 1.0f : 0x1p-10f; }  // of terms, but for `units`
};

inline Vector pairs_of(Integers even, Integers odd) {
    const Words low = (Words)__builtin_convertvector(even, Vector) >> 16;
    return (Vector)(low | ((Words)__builtin_convertvector(odd, Vector) & 0xFFFF0000u));
}

// Decodes the pairs of inputs, PAIRS of them, whose codes are in some vectors of words.
template <int BITS> struct Decoder;

#ifdef __AVX512BF16__
// What the codes from 0 on stand for, for the instructions that look up 16 bits.
inline __m512i numbers_from(int first, int mask) {
    BFloat16 each[32];
    for (int i = 0; i < 32; ++i) put(each[i], float(first + (i & mask)));
    return _mm512_loadu_si512(each);
}
#endif

template <> struct Decoder<4> {
    static constexpr int PAIRS = 4, VECTORS = 1;
    int zero;  // the code of 0
#ifdef __AVX512BF16__
    __m512i numbers;

    explicit Decoder(bool has_offsets) : zero(has_offsets ? 0 : 8), numbers(numbers_from(-zero, 15)) {}

    // A number is looked up by the lowest five bits of each half, the fifth of which is the next code's.
    Vector operator()(const Words* codes, int number) const {
        return (Vector)_mm512_permutexvar_epi16((__m512i)(*codes >> (4 * number)), numbers);
    }
#else
    explicit Decoder(bool has_offsets) : zero(has_offsets ? 0 : 8) {}

    Vector operator()(const Words* codes, int number) const {
        const Words low = *codes >> (4 * number), high = *codes >> (16 + 4 * number);
        return pairs_of((Integers)(low & 15u) - zero, (Integers)(high & 15u) - zero);
    }
#endif
};

template <> struct Decoder<6> {
    static constexpr int PAIRS = 8, VECTORS = 3;
#ifdef __AVX512BF16__
    __m512i first, second;

    explicit Decoder(bool) : first(numbers_from(-32, 31)), second(numbers_from(0, 31)) {}

    // A number is looked up by the lowest six bits of each half.
    Vector operator()(const Words* codes, int number) const {
        return (Vector)_mm512_permutex2var_epi16(first, (__m512i)shifted(codes, number), second);
    }
#else
    explicit Decoder(bool) {}

    Vector operator()(const Words* codes, int number) const {
        const Words found = shifted(codes, number);
        return pairs_of((Integers)(found & 63u) - 32, (Integers)(found >> 16 & 63u) - 32);
    }
#endif

    static Words shifted(const Words* codes, int number) {
        if (number < 6) return codes[number / 2] >> (6 * (number % 2));
        const Words upper = codes[2] >> (2 * number - 4);
        return (codes[number - 6] >> 12 & 0x000F000Fu) | (upper & ~0x000F000Fu);
    }
};

template <> struct Decoder<8> {
    static constexpr int PAIRS = 2, VECTORS = 1;

    explicit Decoder(bool) {}

    Vector operator()(const Words* codes, int number) const {
        const auto* words = (const uint16_t*)codes + number * LANES;
#ifdef __AVX512BF16__
        const auto* halves = (const __m128i*)words;
        const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves));
        const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1));
        return (Vector)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
#else
        Halves narrow;
        std::memcpy(&narrow, words, sizeof narrow);
        const Words wide = __builtin_convertvector(narrow, Words);
        return pairs_of((Integers)(wide << 24) >> 24, (Integers)(wide << 16) >> 24);
#endif
    }
};

// The words of a panel from a group on.
template <int BITS, typename Layer>
inline const Words* words_of(const Layer& layer, int64_t panel, int64_t group) {
    typedef Decoder<BITS> D;
    return layer.words + (panel * layer.pairs + group * layer.group) / D::PAIRS * D::VECTORS;
}

#if defined(__AVX512F__)
inline Vector term(const uint16_t* bits) {
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)bits));
}
#elif defined(__F16C__) && defined(__AVX__)
inline Vector term(const uint16_t* bits) {
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)bits));
}
#else
// Bits of float16, at the places where float32 has its own, are 2^-112 times the number.
inline Vector term(const uint16_t* bits) {
    Halves halves;
    std::memcpy(&halves, bits, sizeof halves);
    const Words wide = __builtin_convertvector(halves, Words);
    const Vector size = (Vector)((wide & 0x7FFFu) << 13) * 0x1p112f;
    return (Vector)((Words)size | ((wide & 0x8000u) << 16));
}
#endif

inline Vector term(const float* number) { return vector_at(number); }

// Compilers convert a vector of bytes one by one.
inline Vector term(const int8_t* number) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)number)));
#elif defined(__AVX2__)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)number)));
#else
    Vector found;
    for (int i = 0; i < LANES; ++i) found[i] = number[i];
    return found;
#endif
}

// Scale and offset of a group.
struct Terms {
    Vector scale, offset;
};

template <typename N> inline Terms terms_at(const N* terms, int64_t place, bool has_offsets) {
    const N* found = terms + place * (has_offsets ? 2 : 1) * LANES;
    __builtin_prefetch((const char*)found + AHEAD_TERMS);
    return {term(found), has_offsets ? term(found + LANES) : Vector{}};
}

// The terms of PANELS panels, one group after the other.
template <int PANELS, typename Layer> struct Reader {
    const Layer& layer;
    int64_t panel;
    Terms units[PANELS];

    __attribute__((always_inline)) void read(int64_t group, Terms (&found)[PANELS]) {
        const bool offsets = layer.has_offsets;
        const bool begins = layer.block > 0 && (group & (layer.block - 1)) == 0;
        for (int p = 0; p < PANELS; ++p) {
            const int64_t place = (panel + p) * layer.num_groups + group;
            if (layer.wide_terms) {
                found[p] = terms_at((const float*)layer.terms, place, offsets);
            } else if (layer.block == 0) {
                found[p] = terms_at((const uint16_t*)layer.terms, place, offsets);
            } else {
                if (begins) units[p] = terms_at(layer.units, place / layer.block, offsets);
                const Terms integers = terms_at((const int8_t*)layer.terms, place, offsets);
                found[p] = {integers.scale * units[p].scale, integers.offset * units[p].offset};
            }
        }
    }
};

// Adds a group to the totals of ROWS rows; `sums` are those of x * code, `sums_of_x` the group's of each row.
template <bool OFFSETS, int ROWS, int PANELS>
inline void add_group(const Terms (&terms)[PANELS], const float* sums_of_x, int64_t stride,
                      const Vector (&sums)[ROWS][PANELS], Vector (&totals)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) {
            Vector total = totals[r][p] + terms[p].scale * sums[r][p];
            if (OFFSETS) total += terms[p].offset * sums_of_x[r * stride];
            totals[r][p] = total;
        }
}

template <int ROWS, int PANELS, typename Layer>
inline void finish(const Layer& layer, int64_t row, int64_t panel, Vector (&totals)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) totals[r][p] *= layer.unit();
    layer.finish(row, panel, totals);
}

// Some groups of PANELS panels, decoded.
template <int PANELS> struct Tile {
    Vector pairs[PANELS][TILE_PAIRS];
    Terms terms[TILE_PAIRS / FEWEST_PAIRS][PANELS];

    template <int BITS, typename Layer>
    void decode(const Layer& layer, int64_t panel, int64_t group, int64_t groups) {
        typedef Decoder<BITS> D;
        const D decoded(layer.has_offsets);
        for (int p = 0; p < PANELS; ++p) {
            const Words* words = words_of<BITS>(layer, panel + p, group);
            for (int64_t pair = 0; pair < groups * layer.group; pair += D::PAIRS, words += D::VECTORS) {
                for (int i = 0; i < D::PAIRS; ++i) pairs[p][pair + i] = decoded(words, i);
                for (int i = 0; i < D::VECTORS; ++i) __builtin_prefetch((const char*)(words + i) + AHEAD_BYTES);
            }
        }
        Reader<PANELS, Layer> reader{layer, panel, {}};
        for (int64_t g = 0; g < groups; ++g) reader.read(group + g, terms[g]);
    }
};

// ROWS rows from `row` on times the groups of a tile, added to `totals`.
template <bool OFFSETS, int ROWS, int PANELS, typename Layer>
void int_block(const Layer& layer, const Tile<PANELS>& tile, const float* sums_of_x, int64_t row,
               int64_t panel, int64_t group, int64_t groups, Vector (&totals)[ROWS][PANELS]) {
    const int64_t stride = layer.pairs, size = layer.group, all = layer.num_groups;
    const auto* x = layer.x + row * stride + group * size;
    sums_of_x += row * all + group;
    Later none{};
    for (int64_t g = 0; g < groups; ++g, x += size) {
        Vector sums[ROWS][PANELS] = {};
        multiply_block<Fetch::NONE, ROWS, PANELS>(x, stride, tile.pairs[0] + g * size, TILE_PAIRS, size, none,
                                                  sums);
        add_group<OFFSETS>(tile.terms[g], sums_of_x + g, all, sums, totals);
    }
    if (group + groups == all) finish(layer, row, panel, totals);
}

// `int_block` for a number of rows, ROWS at most.
template <int ROWS, int PANELS, typename Layer>
void int_block_of(int64_t rows, const Layer& layer, const Tile<PANELS>& tile, const float* sums_of_x,
                  int64_t row, int64_t panel, int64_t group, int64_t groups, Vector* totals) {
    if (rows == ROWS) {
        auto& own = *(Vector(*)[ROWS][PANELS])totals;
        if (layer.has_offsets)
            int_block<true>(layer, tile, sums_of_x, row, panel, group, groups, own);
        else
            int_block<false>(layer, tile, sums_of_x, row, panel, group, groups, own);
    }
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            int_block_of<ROWS - 1, PANELS>(rows, layer, tile, sums_of_x, row, panel, group, groups, totals);
}

// All of the first ROWS rows: codes are decoded as they are multiplied, with the same sums as `int_block`.
template <int BITS, int ROWS, int PANELS, typename Layer>
void few_rows(const Layer& layer, int64_t panel, int64_t next_panel, const float* sums_of_x) {
    typedef Decoder<BITS> D;
    constexpr int64_t AHEAD = AHEAD_BYTES / int64_t(sizeof(Words));
    const int64_t stride = layer.pairs / D::PAIRS * D::VECTORS, all = layer.num_groups;
    const Words* words = words_of<BITS>(layer, panel, 0);
    const Words* last = words + stride - AHEAD;  // from there on it fetches the next task's
    const int64_t onwards = (next_panel - panel - 1) * stride;
    const auto* x = layer.x;
    const D decoded(layer.has_offsets);
    Reader<PANELS, Layer> reader{layer, panel, {}};
    Vector totals[ROWS][PANELS] = {};
    for (int64_t group = 0; group < all; ++group) {
        Vector sums[ROWS][PANELS] = {};
        for (const auto* end = x + layer.group; x < end; x += D::PAIRS, words += D::VECTORS) {
            const Words* fetched = words + AHEAD + (words < last ? 0 : onwards);
            for (int p = 0; p < PANELS; ++p)
                for (int i = 0; i < D::VECTORS; ++i) __builtin_prefetch(fetched + p * stride + i);
            for (int i = 0; i < D::PAIRS; ++i)
                for (int p = 0; p < PANELS; ++p) {
                    const auto right = Layer::X::read(decoded(words + p * stride, i));
                    for (int r = 0; r < ROWS; ++r)
                        sums[r][p] = x[r * layer.pairs + i].add(sums[r][p], right);
                }
        }
        Terms terms[PANELS];
        reader.read(group, terms);
        if (layer.has_offsets)
            add_group<true>(terms, sums_of_x + group, all, sums, totals);
        else
            add_group<false>(terms, sums_of_x + group, all, sums, totals);
    }
    finish(layer, 0, panel, totals);
}

// `few_rows` for a number of rows, ROWS at most.
template <int BITS, int ROWS, int PANELS, typename Layer>
void few_rows_of(const Layer& layer, int64_t panel, int64_t next_panel, const float* sums_of_x) {
    if (layer.rows == ROWS)
        few_rows<BITS, ROWS, PANELS>(layer, panel, next_panel, sums_of_x);
    else if constexpr (ROWS > 1)
        few_rows_of<BITS, ROWS - 1, PANELS>(layer, panel, next_panel, sums_of_x);
}

template <int BITS, int PANELS, typename Layer>
void int_task(const Layer& layer, const LinearTask& task, int64_t next_panel, const float* sums_of_x) {
    constexpr int64_t ROWS = Layer::X::ROWS;
    if (layer.rows <= FEW_ROWS)
        return few_rows_of<BITS, FEW_ROWS, PANELS>(layer, task.panel, next_panel, sums_of_x);
    const int64_t all = layer.num_groups, at_once = TILE_PAIRS / layer.group;
    const int64_t count = task.last - task.first, blocks = (count + ROWS - 1) / ROWS;
    const int64_t rows = (count + blocks - 1) / blocks;
    std::vector<Vector> totals(count * PANELS);
    Tile<PANELS> tile;
    for (int64_t group = 0; group < all; group += at_once) {
        const int64_t groups = smaller(all - group, at_once);
        tile.template decode<BITS>(layer, task.panel, group, groups);
        for (int64_t row = task.first; row < task.last; row += rows) {
            Vector* own = &totals[(row - task.first) * PANELS];
            int_block_of<ROWS, PANELS>(smaller(task.last - row, rows), layer, tile, sums_of_x, row, task.panel,
                                       group, groups, own);
        }
    }
}

// `int_task` for its number of panels, PANELS at most.
template <int BITS, int PANELS, typename Layer>
void int_task_of(const Layer& layer, const LinearTask& task, int64_t next_panel, const float* sums_of_x) {
    if (task.panels == PANELS)
        int_task<BITS, PANELS>(layer, task, next_panel, sums_of_x);
    else if constexpr (PANELS > 1)
        int_task_of<BITS, PANELS - 1>(layer, task, next_panel, sums_of_x);
}

// The sums of each row's groups of x.
template <typename T> std::vector<float> group_sums(const IntLinear<T>& layer) {
    const int64_t size = layer.group, count = layer.rows * layer.num_groups;
    std::vector<float> sums(layer.has_offsets ? count : 0);
    const int64_t wanted = int64_t(sums.size());
#pragma omp parallel for if (wanted * size > 8192)
    for (int64_t i = 0; i < wanted; ++i) {
        float even = 0.0f, odd = 0.0f;
        const T* x = (const T*)layer.x + i * size * 2;
#pragma omp simd reduction(+ : even, odd)
        for (int64_t pair = 0; pair < size; ++pair) even += number(x[2 * pair]), odd += number(x[2 * pair + 1]);
        sums[i] = even + odd;
    }
    return sums;
}

template <typename T> void linear_ints(const IntLinear<T>& layer) {
    constexpr int PANELS = Pair<T>::PANELS;
    const std::vector<float> sums_of_x = group_sums(layer);
    const int64_t threads = omp_get_max_threads();
    // Each chunk decodes its panels.
    const std::vector<LinearTask> tasks =
        linear_tasks(layer.rows, layer.num_panels(), PANELS, threads, 1);
    const int64_t count = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) {
        const int64_t next_panel = tasks[i + threads < count ? i + threads : i].panel;
        if (layer.bits == 4)
            int_task_of<4, PANELS>(layer, tasks[i], next_panel, sums_of_x.data());
        else if (layer.bits == 6)
            int_task_of<6, PANELS>(layer, tasks[i], next_panel, sums_of_x.data());
        else
            int_task_of<8, PANELS>(layer, tasks[i], next_panel, sums_of_x.data());
    }
}

}  // namespace
