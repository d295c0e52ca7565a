// Tiles of AMX: registers of 16 rows of 64 bytes, and products of them.
//
//     sums   [16 rows][16 columns]    float32     +=  left * right
//     left   [16 rows][16 pairs]      bfloat16 pairs of neighbours in the dimension that is summed over
//     right  [16 pairs][16 columns]   bfloat16 pairs of the same neighbours
//
// A product adds the products of even and of odd neighbours apart. The functions are templates of the tiles'
// numbers, which are part of the instructions.

#pragma once

#include "values.h"

#ifndef __AMX_BF16__

namespace {
inline bool has_tiles() { return false; }
}  // namespace

#else

#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

namespace {

constexpr int TILE_ROWS = 16;

// Whether the system lets this process use tiles, for which it has to ask.
inline bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// Tiles 0 to 3 are sums, 4 and 5 the left sides of products, of so many rows and pairs, 6 and 7 the right
// ones.
inline void configure_tiles(int rows, int pairs) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
        config.bytes[tile] = tile == 4 || tile == 5 ? pairs * 4 : 64;
        config.rows[tile] = uint8_t(tile < 6 ? rows : pairs);
    }
    asm volatile("" : : "r"(&config) : "memory");  // compilers know of the first 8 bytes alone that are read
    _tile_loadconfig(&config);
}

template <int TILE> inline void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }

// `stride` is that of rows, in bytes. GCC's intrinsics do not say that they read memory.
template <int TILE> inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUMS, int LEFT, int RIGHT> inline void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// Of two rows and two columns whose numbers differ in BIT alone, two corners change places.
template <int BIT, int... LANE> inline void exchange(Vector* rows, std::integer_sequence<int, LANE...>) {
#pragma GCC unroll 16
    for (int row = 0; row < TILE_ROWS; ++row) {
        if (row & BIT) continue;
        const Vector one = rows[row], other = rows[row + BIT];
        rows[row] = shuffled<((LANE & BIT) == 0 ? LANE : LANE + TILE_ROWS - BIT)...>(one, other);
        rows[row + BIT] = shuffled<((LANE & BIT) == 0 ? LANE + BIT : LANE + TILE_ROWS)...>(one, other);
    }
}

// Exchanges rows and columns of a tile in registers, of float32 values or pairs.
inline void transpose(Vector* rows) {
    constexpr auto LANE = std::make_integer_sequence<int, TILE_ROWS>();
    exchange<1>(rows, LANE);
    exchange<2>(rows, LANE);
    exchange<4>(rows, LANE);
    exchange<8>(rows, LANE);
}

// `multiply_tiles` of as many tiles of rows as there are SUMS.
template <bool ADD, int... SUMS>
inline void multiply_tiles(const uint32_t* left, int64_t pairs_in_row, const Vector* right, int pairs,
                           Vector* out, std::integer_sequence<int, SUMS...>) {
    constexpr int64_t VECTOR = sizeof(Vector);
    const int64_t row = pairs_in_row * int64_t(sizeof *left);
    if constexpr (ADD)
        (load_tile<SUMS>(out + SUMS * TILE_ROWS, VECTOR), ...);
    else
        (zero_tile<SUMS>(), ...);
    for (int k = 0; k < pairs; k += TILE_ROWS) {
        load_tile<6>(right + k, VECTOR);
        ((load_tile<4 + SUMS % 2>(left + SUMS * TILE_ROWS * pairs_in_row + k, row),
          add_product<SUMS, 4 + SUMS % 2, 6>()),
         ...);
    }
    (store_tile<SUMS>(out + SUMS * TILE_ROWS, VECTOR), ...);
}

// out[row] = sum of left[row][pair] * right[pair], in 16 lanes; with ADD plus what `out` held. `rows` and
// `pairs` are multiples of TILE_ROWS.
template <bool ADD>
inline void multiply_tiles(const uint32_t* left, int64_t pairs_in_row, const Vector* right, int pairs,
                           Vector* out, int rows) {
    for (; rows > 0; rows -= 4 * TILE_ROWS, left += 4 * TILE_ROWS * pairs_in_row, out += 4 * TILE_ROWS) {
        const auto of = [&](auto sums) { multiply_tiles<ADD>(left, pairs_in_row, right, pairs, out, sums); };
        switch (rows / TILE_ROWS) {
            case 1: of(std::make_integer_sequence<int, 1>()); break;
            case 2: of(std::make_integer_sequence<int, 2>()); break;
            case 3: of(std::make_integer_sequence<int, 3>()); break;
            default: of(std::make_integer_sequence<int, 4>());
        }
    }
}

}  // namespace

#endif
