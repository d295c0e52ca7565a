// Values and vectors of the kernels in C++.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

// e to the power of x, to 1e-7 of its value; x is clamped to what float32 holds.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return (p * r * r + r + 1.0f) * power;
}

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
typedef float Quarter __attribute__((vector_size(16)));

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

// The sum of what is at these places and FURTHER after them.
template <int FURTHER, int... PLACES, typename V> inline V sum_of_places(V one, V other) {
    return shuffled<PLACES...>(one, other) + shuffled<(PLACES + FURTHER)...>(one, other);
}

// The sums of four vectors.
#ifdef __AVX512F__
inline Quarter sums_of(Vector a, Vector b, Vector c, Vector d) {
    const Vector ab = sum_of_places<8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b);
    const Vector cd = sum_of_places<8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(c, d);
    Vector all = sum_of_places<4, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(ab, cd);
    all += shuffled<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(all, all);
    all += shuffled<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(all, all);
    all = shuffled<0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12>(all, all);
    Quarter result;
    std::memcpy(&result, &all, sizeof result);
    return result;
}
#else
inline Quarter in_four(Vector x) {
    Quarter sum = {}, part;
    for (int i = 0; i < LANES / 4; ++i) {
        std::memcpy(&part, (const char*)&x + i * sizeof part, sizeof part);
        sum += part;
    }
    return sum;
}

inline Quarter sums_of(Vector a, Vector b, Vector c, Vector d) {
    const Quarter ab = sum_of_places<2, 0, 4, 1, 5>(in_four(a), in_four(b));
    const Quarter cd = sum_of_places<2, 0, 4, 1, 5>(in_four(c), in_four(d));
    return sum_of_places<2, 0, 1, 4, 5>(ab, cd);
}
#endif

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

// Pairs of the values at two places.
inline Vector pairs_at(const BFloat16* low, const BFloat16* high) {
    __m512i joined = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low));
    joined = _mm512_inserti64x4(joined, _mm256_loadu_si256((const __m256i*)high), 1);
    return (Vector)_mm512_permutexvar_epi16((__m512i)TURNS, joined);
}
#endif

}  // namespace
