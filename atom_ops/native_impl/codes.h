// Weights of integers in groups of inputs, code * scale + offset: their layout, and how they are decoded.
//
// A weight [O, I] is packed in panels of LANES outputs, as in `linear.h`. In each word of 32 bits even inputs
// are in the low half, odd ones in the high one; a half has, from its lowest bits on,
//
//     4-bit codes           four; without offsets, they are stored plus 8
//     6-bit codes, plus 32; eight pairs are in three words:
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

#include <type_traits>

namespace {

constexpr int64_t TILE_PAIRS = 128;  // pairs of a panel decoded at once; a group has no more
constexpr int64_t FEWEST_PAIRS = 8;  // fewest of a group
constexpr int64_t AHEAD_TERMS = 256;  // bytes of a panel's terms, between what is fetched and what is read

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// A group of inputs of a row.
struct InputGroup {
    float sum;     // the sum of x
    float scale;   // what integers are multiplied by
    int32_t zero;  // what the sum of x * code has too much, since codes are stored plus a number
};

// A pair of neighbours in a row: integers of 16 bits, times the group's scale. Their products with codes are
// exact, and so are the sums of a group.
struct IntegerPair {
    uint32_t bits;

#ifdef __AVX512F__
    static constexpr int ROWS = 4, PANELS = 4;
#else
    static constexpr int ROWS = 4, PANELS = 2;
#endif
    typedef Words Packed;
    typedef Words Right;
    typedef Integers Sum;

    static Words read(Words pairs) {
#ifdef __x86_64__
        asm("" : "+v"(pairs));  // compilers would load them again for each row
#endif
        return pairs;
    }

    Integers add(Integers sum, Words right) const {
        const Words left = Words{} + bits;
#if defined(__AVX512BW__)
        return sum + (Integers)_mm512_madd_epi16((__m512i)left, (__m512i)right);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return sum + (Integers)_mm256_madd_epi16((__m256i)left, (__m256i)right);
#else
        const Integers low = ((Integers)(left << 16) >> 16) * ((Integers)(right << 16) >> 16);
        return sum + low + ((Integers)left >> 16) * ((Integers)right >> 16);
#endif
    }
};

// The sum of x * code.
inline Vector value_of(Vector sum, const InputGroup&) { return sum; }

inline Vector value_of(Integers sum, const InputGroup& group) {
    return group.scale * __builtin_convertvector(sum - group.zero, Vector);
}

// How a row of T is multiplied by codes, which bfloat16 holds exactly.
template <typename T> struct CodeFactor {
    typedef IntegerPair Type;
};

#ifdef __AVX512BF16__
template <> struct CodeFactor<BFloat16> {
    typedef Pair<BFloat16> Type;
};
#endif

template <typename T> struct IntLinear : Rows<T, typename CodeFactor<T>::Type> {
    const Words* words;
    const void* terms;
    const uint16_t* units;
    int64_t group;  // pairs
    int64_t num_groups;
    int64_t block;  // groups that share units, a power of 2; 0 without them
    int bits;
    bool has_offsets, wide_terms;

    float unit() const { return wide_terms || block > 0 ? 1.0f : 0x1p-10f; }  // factor of terms besides `units`
    int zero() const { return bits == 6 ? 32 : bits == 4 && !has_offsets ? 8 : 0; }  // the code of 0
};

// Decodes the pairs of inputs, PAIRS of them, whose codes are in some vectors of words, for X: codes as they
// are stored, in integers of 16 bits, or numbers in bfloat16.
template <int BITS, typename X> struct Decoder;

template <> struct Decoder<4, IntegerPair> {
    static constexpr int PAIRS = 4, VECTORS = 1;

    explicit Decoder(int) {}

    Words operator()(const Words* codes, int number) const { return *codes >> (4 * number) & 0x000F000Fu; }
};

// The word whose halves have the code of a pair in their lowest six bits.
inline Words six_bits(const Words* codes, int number) {
    if (number < 6) return codes[number / 2] >> (6 * (number % 2));
    const Words upper = codes[2] >> (2 * number - 4);
    return (codes[number - 6] >> 12 & 0x000F000Fu) | (upper & ~0x000F000Fu);
}

template <> struct Decoder<6, IntegerPair> {
    static constexpr int PAIRS = 8, VECTORS = 3;

    explicit Decoder(int) {}

    Words operator()(const Words* codes, int number) const { return six_bits(codes, number) & 0x003F003Fu; }
};

template <> struct Decoder<8, IntegerPair> {
    static constexpr int PAIRS = 2, VECTORS = 1;

    explicit Decoder(int) {}

    Words operator()(const Words* codes, int number) const {
        const auto* bytes = (const int8_t*)codes + number * 2 * LANES;
#if defined(__AVX512BW__)
        return (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (Words)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)bytes));
#else
        typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));
        typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
        Bytes narrow;
        std::memcpy(&narrow, bytes, sizeof narrow);
        return (Words)__builtin_convertvector(narrow, Shorts);
#endif
    }
};

#ifdef __AVX512BF16__
// What the codes from 0 on stand for, for the instructions that look up 16 bits.
inline __m512i numbers_from(int first, int mask) {
    BFloat16 each[32];
    for (int i = 0; i < 32; ++i) put(each[i], float(first + (i & mask)));
    return _mm512_loadu_si512(each);
}

template <> struct Decoder<4, Pair<BFloat16>> {
    static constexpr int PAIRS = 4, VECTORS = 1;
    __m512i numbers;

    explicit Decoder(int zero) : numbers(numbers_from(-zero, 15)) {}

    // A number is looked up by the lowest five bits of each half, the fifth of which is the next code's.
    Vector operator()(const Words* codes, int number) const {
        return (Vector)_mm512_permutexvar_epi16((__m512i)(*codes >> (4 * number)), numbers);
    }
};

template <> struct Decoder<6, Pair<BFloat16>> {
    static constexpr int PAIRS = 8, VECTORS = 3;
    __m512i first, second;

    explicit Decoder(int zero) : first(numbers_from(-zero, 31)), second(numbers_from(32 - zero, 31)) {}

    // A number is looked up by the lowest six bits of each half.
    Vector operator()(const Words* codes, int number) const {
        return (Vector)_mm512_permutex2var_epi16(first, (__m512i)six_bits(codes, number), second);
    }
};

template <> struct Decoder<8, Pair<BFloat16>> {
    static constexpr int PAIRS = 2, VECTORS = 1;

    explicit Decoder(int) {}

    Vector operator()(const Words* codes, int number) const {
        const auto* halves = (const __m128i*)((const uint16_t*)codes + number * LANES);
        const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves));
        const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1));
        return (Vector)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
    }
};
#endif

// The words of a panel from a group on.
template <int BITS, typename Layer>
inline const Words* words_of(const Layer& layer, int64_t panel, int64_t group) {
    typedef Decoder<BITS, typename Layer::X> D;
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

// Adds a group to the totals of ROWS rows; `sums` are those of x * code, `groups` the group of each row.
template <bool OFFSETS, typename Sum, int ROWS, int PANELS>
inline void add_group(const Terms (&terms)[PANELS], const InputGroup* groups, int64_t stride,
                      const Sum (&sums)[ROWS][PANELS], Vector (&totals)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r) {
        const InputGroup& group = groups[r * stride];
        for (int p = 0; p < PANELS; ++p) {
            Vector& total = totals[r][p];
            total = multiply_add(terms[p].scale, value_of(sums[r][p], group), total);
            if (OFFSETS) total = multiply_add(terms[p].offset, in_all_lanes(group.sum), total);
        }
    }
}

template <int ROWS, int PANELS, typename Layer>
inline void finish(const Layer& layer, int64_t row, int64_t panel, Vector (&totals)[ROWS][PANELS]) {
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) totals[r][p] *= layer.unit();
    layer.finish(row, panel, totals);
}

// Some groups of PANELS panels, decoded for X.
template <typename X, int PANELS> struct Tile {
    typename X::Packed pairs[PANELS][TILE_PAIRS];
    Terms terms[TILE_PAIRS / FEWEST_PAIRS][PANELS];

    template <int BITS, typename Layer>
    void decode(const Layer& layer, int64_t panel, int64_t group, int64_t groups) {
        typedef Decoder<BITS, X> D;
        const D decoded(layer.zero());
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

}  // namespace
