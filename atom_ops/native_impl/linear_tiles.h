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
#include "tiles.h"

#ifdef __AMX_BF16__

namespace {

constexpr int SUMMED_AT_ONCE = 4;  // groups

// The sums of group number GROUP of those that are summed at once, each with a tile for its sums.
template <int GROUP>
inline void sum_group(const Pair<BFloat16>* x, int64_t stride, const Vector* codes, int64_t size,
                      int64_t pairs, Vector (*sums)[TILE_ROWS]) {
    constexpr int X = 4 + GROUP % 2, CODES = 6 + GROUP % 2;  // groups take turns with these
    zero_tile<GROUP>();
    for (int64_t step = GROUP * size; step < (GROUP + 1) * size; step += pairs) {
        load_tile<X>(x + step, stride * int64_t(sizeof *x));
        load_tile<CODES>(codes + step, sizeof *codes);
        add_product<GROUP, X, CODES>();
    }
    store_tile<GROUP>(sums[GROUP], sizeof **sums);
}

// Adds GROUPS groups of `size` pairs to the totals of `rows` rows. `pairs` are those of a tile.
template <bool OFFSETS, int GROUPS>
void add_groups(const Pair<BFloat16>* x, int64_t stride, const Vector* codes, int64_t size, int64_t pairs,
                const Terms* terms, int64_t terms_stride, const InputGroup* inputs, int64_t inputs_stride, int rows,
                Vector* totals) {
    Vector sums[SUMMED_AT_ONCE][TILE_ROWS];
    sum_group<0>(x, stride, codes, size, pairs, sums);
    if constexpr (GROUPS > 1) sum_group<1>(x, stride, codes, size, pairs, sums);
    if constexpr (GROUPS > 2) sum_group<2>(x, stride, codes, size, pairs, sums);
    if constexpr (GROUPS > 3) sum_group<3>(x, stride, codes, size, pairs, sums);
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
