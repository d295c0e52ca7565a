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

}  // namespace

#endif
