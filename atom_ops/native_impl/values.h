// Values and vectors of the kernels in C++.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void put(float& to, float x) { to = x; }

// Rounds to the nearest, half to even; a NaN stays one.
inline void put(BFloat16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(x == x ? rounded : 0x7FC0);
}

inline int smaller(int64_t one, int64_t other) { return int(one < other ? one : other); }

// As many numbers as a register holds; compilers make much slower code of longer ones.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * LANES)));

inline Vector vector_at(const float* x) {
    Vector result;
    std::memcpy(&result, x, sizeof result);
    return result;
}

inline Vector vector_at(const BFloat16* x) {
    HalfBits bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Vector)(__builtin_convertvector(bits, Bits) << 16);
}

inline Vector in_all_lanes(float x) { return x - Vector{}; }

// As values of T, rounded as `put` does.
template <typename T> inline Vector rounded(Vector x) { return x; }

template <> inline Vector rounded<BFloat16>(Vector x) {
    const Bits bits = (Bits)x;
    const Bits result = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    return (Vector)(x == x ? result : Bits{} + 0x7FC00000);
}

inline void put(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

inline void put(BFloat16* to, Vector x) {
    const HalfBits bits = __builtin_convertvector((Bits)rounded<BFloat16>(x) >> 16, HalfBits);
    std::memcpy(to, &bits, sizeof bits);
}

// In each lane; `other` where one of them is a NaN.
inline Vector larger(Vector one, Vector other) {
#if defined(__AVX512F__)
    return (Vector)_mm512_max_ps((__m512)one, (__m512)other);
#elif defined(__AVX__)
    return (Vector)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return one > other ? one : other;
#endif
}

constexpr float LOG2_E = 1.44269504f;

// 2 to the power of each x, which is 0 at most, to 2e-7 of its value; x is clamped to what float32 holds.
inline Vector power_of_two(Vector x) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: sums with it are integers, in their last bits
    x = larger(in_all_lanes(-125.0f), x);
    const Vector shifted = x + SHIFT;
    const Vector r = x - (shifted - SHIFT);
    Vector p = in_all_lanes(1.326472731e-3f);
    p = p * r + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    p = p * r + 1.0f;
    return (Vector)((Integers)p + ((Integers)shifted << 23));
}

// Rounded once, where the CPU can. Compilers choose that for each loop, and so the bits of a row might depend on
// how many rows there are.
inline Vector multiply_add(Vector one, Vector other, Vector sum) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
    return one * other + sum;
#endif
}

// What is at these places of two vectors, the second one after the first.
template <int... PLACES, typename V> inline V shuffled(V one, V other) {
#ifdef __clang__
    return __builtin_shufflevector(one, other, PLACES...);
#else
    typedef int Places __attribute__((vector_size(sizeof(V))));
    return __builtin_shuffle(one, other, Places{PLACES...});
#endif
}

// The highest of the lanes whose numbers differ in BIT and the bits below it, in each.
template <int BIT, int... LANE> inline Vector highest(Vector x, std::integer_sequence<int, LANE...> lanes) {
    x = larger(x, shuffled<(LANE ^ BIT)...>(x, x));
    if constexpr (BIT > 1) x = highest<BIT / 2>(x, lanes);
    return x;
}

// The highest lane, in each.
inline Vector highest(Vector x) { return highest<LANES / 2>(x, std::make_integer_sequence<int, LANES>()); }

// Adds lanes whose numbers differ in BIT alone: those of `x[i]` where the bit is 0, those of `x[i + BIT]` where
// it is 1.
template <int BIT, int... LANE> inline void add_lanes(Vector* x, std::integer_sequence<int, LANE...> lanes) {
#pragma GCC unroll 8
    for (int i = 0; i < BIT; ++i)
        x[i] = shuffled<(LANE & BIT ? LANE + LANES : LANE)...>(x[i], x[i + BIT]) +
               shuffled<(LANE & BIT ? LANE + LANES - BIT : LANE + BIT)...>(x[i], x[i + BIT]);
    if constexpr (BIT > 1) add_lanes<BIT / 2>(x, lanes);
}

// The sum of the lanes of x[i] in lane i, of LANES vectors, which are overwritten.
inline Vector sums_of(Vector* x) {
    add_lanes<LANES / 2>(x, std::make_integer_sequence<int, LANES>());
    return x[0];
}

#ifdef __AVX512BF16__
// Vectors of 16 pairs of bfloat16, as bits. Their products are exact in float32.
inline Vector add_pairs(Vector sum, Vector left, Vector right) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

inline Vector in_all_lanes(uint32_t pair) { return (Vector)_mm512_set1_epi32(int(pair)); }

// Values of two halves of a vector that take turns.
typedef int16_t Places __attribute__((vector_size(64)));
constexpr Places TURNS = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Pairs of the lanes of two vectors, rounded to the nearest, half to even.
inline Vector pairs_of(Vector low, Vector high) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (Vector)_mm512_permutexvar_epi16((__m512i)TURNS, (__m512i)rounded);
}

// Pairs of neighbours. A memcpy to an array of vectors would go by halves and through memory, for which loads of
// whole vectors then wait.
inline Vector pairs_at(const BFloat16* x) { return (Vector)_mm512_loadu_si512(x); }

// Pairs of the values at two places.
inline Vector pairs_at(const BFloat16* low, const BFloat16* high) {
    __m512i joined = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low));
    joined = _mm512_inserti64x4(joined, _mm256_loadu_si256((const __m256i*)high), 1);
    return (Vector)_mm512_permutexvar_epi16((__m512i)TURNS, joined);
}
#endif

}  // namespace
