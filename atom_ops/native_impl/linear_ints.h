// Linear layers with weights of integers in groups of inputs: see `codes.h`.
//
// A result adds, for each group, scale * (sum of x * code) and offset * (sum of x), in float32. Codes are
// multiplied as they are: by rows of bfloat16 where there are instructions for pairs of it, else by integers
// of 16 bits, to which each group of a row is rounded: its largest number becomes LARGEST.

#pragma once

#include "codes.h"
#include "linear_tiles.h"

#include <memory>

namespace {

constexpr int FEW_ROWS = 4;           // whose codes are decoded as they are multiplied
constexpr int LARGEST = 32767;        // largest rounded number of a group
constexpr float SMALLEST = 1.0e-30f;  // groups of smaller numbers count as zeros

// ROWS rows from `row` on times the groups of a tile, added to `totals`.
template <bool OFFSETS, int ROWS, int PANELS, typename Layer>
void int_block(const Layer& layer, const Tile<typename Layer::X, PANELS>& tile, const InputGroup* inputs,
               int64_t row, int64_t panel, int64_t group, int64_t groups, Vector (&totals)[ROWS][PANELS]) {
    const int64_t stride = layer.pairs, size = layer.group, all = layer.num_groups;
    const auto* x = layer.x + row * stride + group * size;
    inputs += row * all + group;
    Later none{};
    for (int64_t g = 0; g < groups; ++g, x += size) {
        typename Layer::X::Sum sums[ROWS][PANELS] = {};
        multiply_block<Fetch::NONE, ROWS, PANELS>(x, stride, tile.pairs[0] + g * size, TILE_PAIRS, size, none,
                                                  sums);
        add_group<OFFSETS>(tile.terms[g], inputs + g, all, sums, totals);
    }
    if (group + groups == all) finish(layer, row, panel, totals);
}

// `int_block` for a number of rows, ROWS at most.
template <int ROWS, int PANELS, typename Layer>
void int_block_of(int64_t rows, const Layer& layer, const Tile<typename Layer::X, PANELS>& tile,
                  const InputGroup* inputs, int64_t row, int64_t panel, int64_t group, int64_t groups,
                  Vector* totals) {
    if (rows == ROWS) {
        auto& own = *(Vector(*)[ROWS][PANELS])totals;
        if (layer.has_offsets)
            int_block<true>(layer, tile, inputs, row, panel, group, groups, own);
        else
            int_block<false>(layer, tile, inputs, row, panel, group, groups, own);
    }
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            int_block_of<ROWS - 1, PANELS>(rows, layer, tile, inputs, row, panel, group, groups, totals);
}

// All of the first ROWS rows: codes are decoded as they are multiplied, with the same sums as `int_block`.
template <int BITS, int ROWS, int PANELS, typename Layer>
void few_rows(const Layer& layer, int64_t panel, int64_t next_panel, const InputGroup* inputs) {
    typedef typename Layer::X X;
    typedef Decoder<BITS, X> D;
    constexpr int64_t AHEAD = AHEAD_BYTES / int64_t(sizeof(Words));
    const int64_t stride = layer.pairs / D::PAIRS * D::VECTORS, all = layer.num_groups;
    const Words* words = words_of<BITS>(layer, panel, 0);
    const Words* last = words + stride - AHEAD;  // from there on it fetches the next task's
    const int64_t onwards = (next_panel - panel - 1) * stride;
    const X* x = layer.x;
    const D decoded(layer.zero());
    Reader<PANELS, Layer> reader{layer, panel, {}};
    Vector totals[ROWS][PANELS] = {};
    for (int64_t group = 0; group < all; ++group) {
        typename X::Sum sums[ROWS][PANELS] = {};
        const int64_t ahead = AHEAD + (words < last ? 0 : onwards);
        for (const X* end = x + layer.group; x < end; x += D::PAIRS, words += D::VECTORS) {
            for (int p = 0; p < PANELS; ++p)
                for (int i = 0; i < D::VECTORS; ++i) __builtin_prefetch(words + ahead + p * stride + i);
            for (int i = 0; i < D::PAIRS; ++i)
                for (int p = 0; p < PANELS; ++p) {
                    const auto right = X::read(decoded(words + p * stride, i));
                    for (int r = 0; r < ROWS; ++r)
                        sums[r][p] = x[r * layer.pairs + i].add(sums[r][p], right);
                }
        }
        Terms terms[PANELS];
        reader.read(group, terms);
        if (layer.has_offsets)
            add_group<true>(terms, inputs + group, all, sums, totals);
        else
            add_group<false>(terms, inputs + group, all, sums, totals);
    }
    finish(layer, 0, panel, totals);
}

// `few_rows` for a number of rows, ROWS at most.
template <int BITS, int ROWS, int PANELS, typename Layer>
void few_rows_of(const Layer& layer, int64_t panel, int64_t next_panel, const InputGroup* inputs) {
    if (layer.rows == ROWS)
        few_rows<BITS, ROWS, PANELS>(layer, panel, next_panel, inputs);
    else if constexpr (ROWS > 1)
        few_rows_of<BITS, ROWS - 1, PANELS>(layer, panel, next_panel, inputs);
}

template <int BITS, int PANELS, typename Layer>
void int_task(const Layer& layer, const LinearTask& task, int64_t next_panel, const InputGroup* inputs) {
    typedef typename Layer::X X;
    constexpr int64_t ROWS = X::ROWS;
    if (layer.rows <= FEW_ROWS)
        return few_rows_of<BITS, FEW_ROWS, PANELS>(layer, task.panel, next_panel, inputs);
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<X, Pair<BFloat16>>)
        if (has_tiles()) return tile_task<BITS, PANELS>(layer, task, inputs);
#endif
    const int64_t all = layer.num_groups, at_once = TILE_PAIRS / layer.group;
    const int64_t count = task.last - task.first, blocks = (count + ROWS - 1) / ROWS;
    const int64_t rows = (count + blocks - 1) / blocks;
    std::vector<Vector> totals(count * PANELS);
    Tile<X, PANELS> tile;
    for (int64_t group = 0; group < all; group += at_once) {
        const int64_t groups = smaller(all - group, at_once);
        tile.template decode<BITS>(layer, task.panel, group, groups);
        for (int64_t row = task.first; row < task.last; row += rows) {
            Vector* own = &totals[(row - task.first) * PANELS];
            int_block_of<ROWS, PANELS>(smaller(task.last - row, rows), layer, tile, inputs, row, task.panel,
                                       group, groups, own);
        }
    }
}

// `int_task` for its number of panels, PANELS at most.
template <int BITS, int PANELS, typename Layer>
void int_task_of(const Layer& layer, const LinearTask& task, int64_t next_panel, const InputGroup* inputs) {
    if (task.panels == PANELS)
        int_task<BITS, PANELS>(layer, task, next_panel, inputs);
    else if constexpr (PANELS > 1)
        int_task_of<BITS, PANELS - 1>(layer, task, next_panel, inputs);
}

template <typename Layer> void multiply_ints(const Layer& layer, const InputGroup* inputs) {
    constexpr int PANELS = Layer::X::PANELS;
    const int64_t threads = omp_get_max_threads();
    // Each chunk decodes its panels.
    const std::vector<LinearTask> tasks =
        linear_tasks(layer.rows, layer.num_panels(), PANELS, threads, 1);
    const int64_t count = int64_t(tasks.size());
    const int64_t together = taken_together(count, threads);
#pragma omp parallel for schedule(dynamic, together)
    for (int64_t i = 0; i < count; ++i) {
        const int64_t next_panel = tasks[task_after(i, count, threads, together)].panel;
        if (layer.bits == 4)
            int_task_of<4, PANELS>(layer, tasks[i], next_panel, inputs);
        else if (layer.bits == 6)
            int_task_of<6, PANELS>(layer, tasks[i], next_panel, inputs);
        else
            int_task_of<8, PANELS>(layer, tasks[i], next_panel, inputs);
    }
}

#ifdef __AVX512BF16__
// A group of `count` inputs for products in bfloat16, which take x as it is.
inline InputGroup prepared(const BFloat16* x, int64_t count, int, Pair<BFloat16>*) {
    float even = 0.0f, odd = 0.0f;
#pragma omp simd reduction(+ : even, odd)
    for (int64_t i = 0; i < count; i += 2) even += number(x[i]), odd += number(x[i + 1]);
    return {even + odd, 1.0f, 0};
}
#endif

// A group of `count` inputs, rounded. If a number is not finite, the scale is not.
template <typename T> InputGroup prepared(const T* x, int64_t count, int zero, IntegerPair* pairs) {
    auto* integers = (int16_t*)pairs;
    float top = 0.0f, nothing = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : nothing)
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(number(x[i]));
        top = size > top ? size : top;
        nothing += size * 0.0f;  // NaN of one that is not finite
    }
    if (!(top > SMALLEST) || nothing != 0.0f) {
        std::memset(integers, 0, count * sizeof *integers);
        return {nothing, nothing, 0};
    }
    const float factor = float(LARGEST) / top;
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
        const auto integer = int32_t(__builtin_rintf(number(x[i]) * factor));
        integers[i] = int16_t(integer);
        sum += integer;
    }
    const float scale = top / float(LARGEST);
    return {scale * float(sum), scale, zero * sum};
}

template <typename T> void linear_ints(IntLinear<T> layer, const T* x) {
    typedef typename IntLinear<T>::X X;
    constexpr bool ROUNDS = std::is_same_v<X, IntegerPair>;
    const int64_t size = layer.group, count = layer.rows * layer.num_groups;
    const std::unique_ptr<X[]> rounded(new X[ROUNDS ? count * size : 0]);
    std::vector<InputGroup> inputs(ROUNDS || layer.has_offsets ? count : 0);
    const int64_t prepares = int64_t(inputs.size());
#pragma omp parallel for if (prepares * size > 8192)
    for (int64_t i = 0; i < prepares; ++i)
        inputs[i] = prepared(x + i * size * 2, size * 2, layer.zero(), rounded.get() + i * size);
    layer.x = ROUNDS ? rounded.get() : (const X*)x;
    multiply_ints(layer, inputs.data());
}

}  // namespace
