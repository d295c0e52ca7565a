// Linear layers in bfloat16, for CPUs that multiply pairs of it by vectors and have no tiles (AMX), for
// which oneDNN is faster.
//
// A weight [O, I] is packed in panels of 16 outputs. A vector of a panel has one pair of inputs of each:
//
//     panels[output / 16][input / 2][output % 16][input % 2]
//
// A block of rows is multiplied by some panels at once; all its sums are in registers. Each sum adds its
// products in one order, so that a row of the result does not depend on the others.

#pragma once

#include "values.h"

#include <omp.h>
#include <vector>

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define MULTIPLIES_PAIRS

namespace {

constexpr int BLOCK = 6;                   // rows
constexpr int UNIT = 4;                    // panels
constexpr int64_t DEPTH = 2048;            // pairs of inputs whose panels stay in the L2 cache
constexpr int64_t MOST_ROWS = 384;         // of a task, for the same reason
constexpr int64_t FEWEST_ROWS = 16;        // of a task, where others have the same panels
constexpr int64_t MOST_LATER = 512 << 10;  // bytes that are fetched for a later task
constexpr int64_t AHEAD_VECTORS = 32;      // of a panel, between what is fetched and what is read
constexpr int64_t LINE = 64;               // bytes, of a vector and of the caches

template <typename Out> struct Linear {
    const uint32_t* x;  // pairs
    const Vector* panels;
    const BFloat16* bias;
    Out* out;
    int64_t rows, outputs, pairs;

    int64_t num_panels() const { return (outputs + LANES - 1) / LANES; }
};

// What a thread computes at a time: rows first ... last - 1 times some panels.
struct LinearTask {
    int64_t first, last, panel, panels;
};

// What is fetched into the caches while a block is multiplied.
enum class Fetch {
    OWN,    // these panels: it is the first block that reads them
    LATER,  // the panels of a later task
    NONE,
};

// Panels of a later task that are still to be fetched.
struct Later {
    const char *next, *end;
    int64_t lines;  // in each step

    void step() {
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + i * LINE, 0, 2);
        next += lines * LINE;
    }
};

// Adds the products of `depth` pairs to ROWS x PANELS vectors of sums.
template <Fetch FETCH, int ROWS, int PANELS>
inline void multiply_block(const uint32_t* x, const Vector* panels, int64_t stride, int64_t depth,
                           Later& later, Vector (&sums)[ROWS][PANELS]) {
    for (const uint32_t* end = x + depth; x < end; ++x, ++panels) {
        Vector right[PANELS];
        for (int p = 0; p < PANELS; ++p) right[p] = panels[p * stride];
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANELS; ++p)
                sums[r][p] = add_pairs(sums[r][p], in_all_lanes(x[r * stride]), right[p]);
        if (FETCH == Fetch::OWN)
            for (int p = 0; p < PANELS; ++p) __builtin_prefetch(panels + p * stride + AHEAD_VECTORS);
        if (FETCH == Fetch::LATER) later.step();
    }
}

inline void put_vector(float* out, Vector x, int count) { std::memcpy(out, &x, count * sizeof *out); }

inline void put_vector(BFloat16* out, Vector x, int count) {
    const auto rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(out, &rounded, count * sizeof *out);
}

// ROWS rows from `row` on times PANELS panels: pairs from `start` on, in one piece with the earlier ones,
// whose sums are in `partial`.
template <int ROWS, int PANELS, typename Out>
void one_block(const Linear<Out>& layer, int64_t row, int64_t panel, int64_t start, bool is_first,
               Later& later, Vector* partial) {
    const int64_t stride = layer.pairs, depth = stride - start < DEPTH ? stride - start : DEPTH;
    const uint32_t* x = layer.x + row * stride + start;
    const Vector* panels = layer.panels + panel * stride + start;
    Vector sums[ROWS][PANELS] = {};
    if (start > 0) std::memcpy(sums, partial, sizeof sums);
    if (is_first)
        multiply_block<Fetch::OWN, ROWS, PANELS>(x, panels, stride, depth, later, sums);
    else if (later.next < later.end)
        multiply_block<Fetch::LATER, ROWS, PANELS>(x, panels, stride, depth, later, sums);
    else
        multiply_block<Fetch::NONE, ROWS, PANELS>(x, panels, stride, depth, later, sums);
    if (start + depth < stride) {
        std::memcpy(partial, sums, sizeof sums);
        return;
    }
    for (int p = 0; p < PANELS; ++p) {
        const int64_t first = (panel + p) * LANES;
        const int count = int(layer.outputs - first < LANES ? layer.outputs - first : LANES);
        Vector bias = {};
        if (layer.bias != nullptr)
            for (int i = 0; i < count; ++i) bias[i] = number(layer.bias[first + i]);
        for (int r = 0; r < ROWS; ++r)
            put_vector(layer.out + (row + r) * layer.outputs + first, sums[r][p] + bias, count);
    }
}

// Blocks of about equal size, with all pairs in pieces of DEPTH.
template <int PANELS, typename Out>
void one_task(const Linear<Out>& layer, const LinearTask& task, const LinearTask& next) {
    const int64_t count = task.last - task.first, blocks = (count + BLOCK - 1) / BLOCK;
    const int64_t rows = (count + blocks - 1) / blocks, panel = task.panel;
    const char* begin = (const char*)(layer.panels + next.panel * layer.pairs);
    const int64_t size = next.panels * layer.pairs * LINE;
    const bool fetches = next.panel != panel && size <= MOST_LATER;
    Later later{begin, begin + (fetches ? size : 0), blocks > UNIT ? 1 : UNIT / (blocks > 1 ? blocks - 1 : 1)};
    std::vector<Vector> partial(layer.pairs > DEPTH ? count * PANELS : 0);
    for (int64_t start = 0; start < layer.pairs; start += DEPTH) {
        for (int64_t row = task.first; row < task.last; row += rows) {
            Vector* own = partial.empty() ? nullptr : &partial[(row - task.first) * PANELS];
            const bool is_first = row == task.first;
            switch (task.last - row < rows ? task.last - row : rows) {
                case 1: one_block<1, PANELS>(layer, row, panel, start, is_first, later, own); break;
                case 2: one_block<2, PANELS>(layer, row, panel, start, is_first, later, own); break;
                case 3: one_block<3, PANELS>(layer, row, panel, start, is_first, later, own); break;
                case 4: one_block<4, PANELS>(layer, row, panel, start, is_first, later, own); break;
                case 5: one_block<5, PANELS>(layer, row, panel, start, is_first, later, own); break;
                default: one_block<BLOCK, PANELS>(layer, row, panel, start, is_first, later, own);
            }
        }
    }
}

// Many rows are shared out among threads by chunks; few by panels, fewer of them towards the end.
inline std::vector<LinearTask> linear_tasks(int64_t rows, int64_t panels, int64_t threads) {
    int64_t chunks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if (chunks == 1 && rows >= 2 * FEWEST_ROWS) chunks = 2;
    while (chunks * panels < 8 * UNIT * threads && rows / (chunks + 1) >= FEWEST_ROWS) ++chunks;
    std::vector<LinearTask> tasks;
    for (int64_t panel = 0, taken; panel < panels; panel += taken) {
        const int64_t left = panels - panel, fair = chunks > 1 ? UNIT : left / (2 * threads);
        taken = fair < 1 ? 1 : fair > UNIT ? UNIT : fair;
        taken = taken < left ? taken : left;
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            tasks.push_back({rows * chunk / chunks, rows * (chunk + 1) / chunks, panel, taken});
    }
    return tasks;
}

template <typename Out> void linear(const Linear<Out>& layer) {
    const int64_t threads = omp_get_max_threads();
    const std::vector<LinearTask> tasks = linear_tasks(layer.rows, layer.num_panels(), threads);
    const int64_t count = int64_t(tasks.size());
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t number = 0; number < count; ++number) {
        const LinearTask& task = tasks[number];
        const LinearTask& next = tasks[number + threads < count ? number + threads : number];
        switch (task.panels) {
            case 1: one_task<1>(layer, task, next); break;
            case 2: one_task<2>(layer, task, next); break;
            case 3: one_task<3>(layer, task, next); break;
            default: one_task<UNIT>(layer, task, next);
        }
    }
}

}  // namespace
#endif
