// `linear_ints` of more than a few rows of bfloat16, by AMX.
//
//     x        [16 rows][16 pairs of inputs]       a tile, read where it is
//     codes    [16 pairs of inputs][16 outputs]    a tile, of what `Tile` has decoded
//     sums     [16 rows][16 outputs]               x * code of a group, in float32
//
// Sums pass through memory to the registers that scale them and add them to the totals. A row of the result
// does not depend on the others, but its last bits are not those of `few_rows`: AMX adds the products of even
// and of odd inputs apart.

#pragma once

#include "codes.h"

#ifndef __AMX_BF16__

namespace {
inline bool has_tiles() { return false; }
}  // namespace

#else

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE_ROWS = 16;
constexpr int SUMMED_AT_ONCE = 4;  // groups

// Whether the system lets this process use tiles, for which it has to ask.
inline bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 codes.
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

// The sums of a group: SUMS is their tile; X and CODES are tiles that groups take turns with.
#define SUM_GROUP(SUMS, X, CODES)                                                                  \
    _tile_zero(SUMS);                                                                              \
    for (int64_t step = 0; step < size; step += pairs) {                                           \
        _tile_loadd(X, x + SUMS * size + step, stride * int64_t(sizeof *x));                       \
        _tile_loadd(CODES, codes + SUMS * size + step, sizeof *codes);                             \
        _tile_dpbf16ps(SUMS, X, CODES);                                                            \
    }                                                                                              \
    _tile_stored(SUMS, sums[SUMS], sizeof *sums[SUMS])

// Adds GROUPS groups of `size` pairs to the totals of `rows` rows. `pairs` are those of a tile.
template <bool OFFSETS, int GROUPS>
void add_groups(const Pair<BFloat16>* x, int64_t stride, const Vector* codes, int64_t size, int64_t pairs,
                const Terms* terms, int64_t terms_stride, const InputGroup* inputs, int64_t inputs_stride, int rows,
                Vector* totals) {
    Vector sums[SUMMED_AT_ONCE][TILE_ROWS];
    SUM_GROUP(0, 4, 6);
    if constexpr (GROUPS > 1) { SUM_GROUP(1, 5, 7); }
    if constexpr (GROUPS > 2) { SUM_GROUP(2, 4, 6); }
    if constexpr (GROUPS > 3) { SUM_GROUP(3, 5, 7); }
    for (int r = 0; r < rows; ++r) {
        Vector total = totals[r];
        for (int g = 0; g < GROUPS; ++g) {
            const Terms& own = terms[g * terms_stride];
            total = multiply_add(own.scale, sums[g][r], total);
            if (OFFSETS)
                total = multiply_add(own.offset, in_all_lanes(inputs[r * inputs_stride + g].sum), total);
        }
        totals[r] = total;
    }
}

#undef SUM_GROUP

// `add_groups` for a number of groups, GROUPS at most.
template <bool OFFSETS, int GROUPS, typename... Rest>
void add_groups_of(int64_t groups, Rest... rest) {
    if (groups == GROUPS)
        add_groups<OFFSETS, GROUPS>(rest...);
    else if constexpr (GROUPS > 1)
        add_groups_of<OFFSETS, GROUPS - 1>(groups, rest...);
}

// As `int_block`, for one panel, the `number`-th of the tile.
template <bool OFFSETS, int PANELS, typename Layer>
void tile_block(const Layer& layer, const Tile<Pair<BFloat16>, PANELS>& tile, const InputGroup* inputs, int64_t row, int rows,
                int64_t panel, int number, int64_t group, int64_t groups, Vector* totals) {
    const int64_t size = layer.group, all = layer.num_groups, pairs = smaller(size, 16);
    for (int64_t g = 0; g < groups; g += SUMMED_AT_ONCE)
        add_groups_of<OFFSETS, SUMMED_AT_ONCE>(
            smaller(groups - g, SUMMED_AT_ONCE), layer.x + row * layer.pairs + (group + g) * size, layer.pairs,
            tile.pairs[number] + g * size, size, pairs, &tile.terms[g][number], int64_t(PANELS),
            inputs + row * all + group + g, all, rows, totals);
    if (group + groups < all) return;
    int r = 0;
    for (; r + 4 <= rows; r += 4) finish(layer, row + r, panel + number, *(Vector(*)[4][1])(totals + r));
    for (; r < rows; ++r) finish(layer, row + r, panel + number, *(Vector(*)[1][1])(totals + r));
}

// A task by tiles. The last block of rows begins where it ends with the task: some rows may be computed twice.
template <int BITS, int PANELS, typename Layer>
void tile_task(const Layer& layer, const LinearTask& task, const InputGroup* inputs) {
    const int64_t all = layer.num_groups, at_once = TILE_PAIRS / layer.group;
    const int64_t count = task.last - task.first, blocks = (count + TILE_ROWS - 1) / TILE_ROWS;
    const int rows = smaller(count, TILE_ROWS);
    std::vector<Vector> totals(blocks * PANELS * TILE_ROWS);
    Tile<Pair<BFloat16>, PANELS> tile;
    configure_tiles(rows, smaller(layer.group, 16));
    for (int64_t group = 0; group < all; group += at_once) {
        const int64_t groups = smaller(all - group, at_once);
        tile.template decode<BITS>(layer, task.panel, group, groups);
        asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from there
        Vector* own = totals.data();
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = smaller(task.first + block * TILE_ROWS, task.last - rows);
            for (int p = 0; p < PANELS; ++p, own += TILE_ROWS) {
                if (layer.has_offsets)
                    tile_block<true>(layer, tile, inputs, row, rows, task.panel, p, group, groups, own);
                else
                    tile_block<false>(layer, tile, inputs, row, rows, task.panel, p, group, groups, own);
            }
        }
    }
    _tile_release();
}

}  // namespace

#endif
