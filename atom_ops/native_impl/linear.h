// Linear layers with weights of bfloat16 values, and rows of bfloat16 or float32.
//
// A weight [O, I] is packed in panels of LANES outputs. A vector of a panel has one pair of inputs of each:
//
//     panels[output / LANES][input / 2][output % LANES][input % 2]
//
// A block of rows is multiplied by some panels at once; all its sums are in registers. Each sum adds its
// products in one order, so that a row of the result does not depend on the others.

#pragma once

#include "values.h"

#include <omp.h>
#include <vector>

namespace {

constexpr int64_t DEPTH = 2048;            // pairs of inputs whose panels stay in the L2 cache
constexpr int64_t MOST_ROWS = 384;         // rows of a task at most, for the same reason
constexpr int64_t FEWEST_ROWS = 16;        // rows of a task at least, where others have the same panels
constexpr int64_t MOST_LATER = 512 << 10;  // bytes that are fetched for a later task
constexpr int64_t AHEAD_BYTES = 2048;      // bytes of a panel between what is fetched and what is read
constexpr int64_t LINE = 64;               // bytes, of the caches

// A pair of neighbours in a row, and how it is multiplied by a vector of pairs of bfloat16. ROWS x PANELS
// sums fit into the registers.
template <typename T> struct Pair {
    T even, odd;

#ifdef __AVX512F__
    static constexpr int ROWS = 4, PANELS = 4;
#else
    static constexpr int ROWS = 4, PANELS = 2;
#endif

    typedef Vector Packed, Sum;  // pairs of a panel, and sums of products
    struct Right {
        Vector even, odd;
    };

    static Right read(Vector pairs) {
        typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
        return {(Vector)((Bits)pairs << 16), (Vector)((Bits)pairs & 0xFFFF0000u)};
    }
    Vector add(Vector sum, const Right& right) const {
        sum = multiply_add(in_all_lanes(number(even)), right.even, sum);
        return multiply_add(in_all_lanes(number(odd)), right.odd, sum);
    }
};

#ifdef __AVX512BF16__
template <> struct Pair<BFloat16> {
    uint32_t bits;

    static constexpr int ROWS = 6, PANELS = 4;
    typedef Vector Packed, Sum, Right;

    static Right read(Vector pairs) { return pairs; }
    Vector add(Vector sum, Vector right) const { return add_pairs(sum, in_all_lanes(bits), right); }
};
#endif

inline void put_vector(float* out, Vector x, int count) { std::memcpy(out, &x, count * sizeof *out); }

inline void put_vector(BFloat16* out, Vector x, int count) {
#ifdef __AVX512BF16__
    const auto rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(out, &rounded, count * sizeof *out);
#else
    for (int i = 0; i < count; ++i) put(out[i], x[i]);
#endif
}

// Rows of T, in pairs, and a bias; the result is of T too, or of float32.
template <typename T, typename InputPair = Pair<T>> struct Rows {
    typedef InputPair X;

    const X* x;
    const T* bias;
    void* out;
    bool in_float32;
    int64_t rows, outputs, pairs;

    void store(int64_t row, int64_t first, Vector sums, int count) const {
        const int64_t place = row * outputs + first;
        if (in_float32)
            put_vector((float*)out + place, sums, count);
        else
            put_vector((T*)out + place, sums, count);
    }

    // The finished sums of some rows and panels.
    template <int ROWS, int PANELS>
    void finish(int64_t row, int64_t panel, const Vector (&sums)[ROWS][PANELS]) const {
        for (int p = 0; p < PANELS; ++p) {
            const int64_t first = (panel + p) * LANES;
            const int count = smaller(outputs - first, LANES);
            Vector added = {};
            if (bias != nullptr)
                for (int i = 0; i < count; ++i) added[i] = number(bias[first + i]);
            for (int r = 0; r < ROWS; ++r) store(row + r, first, sums[r][p] + added, count);
        }
    }

    int64_t num_panels() const { return (outputs + LANES - 1) / LANES; }
};

template <typename T> struct Linear : Rows<T> {
    const Vector* panels;
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

// Adds the products of `depth` pairs to ROWS x PANELS vectors of sums. Rows are x_stride pairs apart, panels
// `stride` vectors.
template <Fetch FETCH, int ROWS, int PANELS, typename X>
inline void multiply_block(const X* x, int64_t x_stride, const typename X::Packed* panels, int64_t stride,
                           int64_t depth, Later& later, typename X::Sum (&sums)[ROWS][PANELS]) {
    for (const X* end = x + depth; x < end; ++x, ++panels) {
        typename X::Right right[PANELS];
        for (int p = 0; p < PANELS; ++p) right[p] = X::read(panels[p * stride]);
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANELS; ++p) sums[r][p] = x[r * x_stride].add(sums[r][p], right[p]);
        if (FETCH == Fetch::OWN)
            for (int p = 0; p < PANELS; ++p)
                __builtin_prefetch((const char*)(panels + p * stride) + AHEAD_BYTES);
        if (FETCH == Fetch::LATER) later.step();
    }
}

// ROWS rows from `row` on times PANELS panels: pairs from `start` on, in one piece with the earlier ones,
// whose sums are in `partial`.
template <int ROWS, int PANELS, typename Layer>
void one_block(const Layer& layer, int64_t row, int64_t panel, int64_t start, bool is_first,
               Later& later, Vector* partial) {
    const int64_t stride = layer.pairs, depth = smaller(stride - start, DEPTH);
    const auto* x = layer.x + row * stride + start;
    const Vector* panels = layer.panels + panel * stride + start;
    Vector sums[ROWS][PANELS] = {};
    if (start > 0) std::memcpy(sums, partial, sizeof sums);
    if (is_first)
        multiply_block<Fetch::OWN, ROWS, PANELS>(x, stride, panels, stride, depth, later, sums);
    else if (later.next < later.end)
        multiply_block<Fetch::LATER, ROWS, PANELS>(x, stride, panels, stride, depth, later, sums);
    else
        multiply_block<Fetch::NONE, ROWS, PANELS>(x, stride, panels, stride, depth, later, sums);
    if (start + depth < stride) {
        std::memcpy(partial, sums, sizeof sums);
        return;
    }
    layer.finish(row, panel, sums);
}

// `one_block` for a number of rows, ROWS at most.
template <int ROWS, int PANELS, typename Layer>
void block_of(int64_t rows, const Layer& layer, int64_t row, int64_t panel, int64_t start, bool is_first,
              Later& later, Vector* partial) {
    if (rows == ROWS)
        one_block<ROWS, PANELS>(layer, row, panel, start, is_first, later, partial);
    else if constexpr (ROWS > 1)
        block_of<ROWS - 1, PANELS>(rows, layer, row, panel, start, is_first, later, partial);
}

// Blocks of about equal size, with all pairs in pieces of DEPTH.
template <int PANELS, typename Layer>
void one_task(const Layer& layer, const LinearTask& task, const LinearTask& next) {
    typedef typename Layer::X X;
    const int64_t count = task.last - task.first, blocks = (count + X::ROWS - 1) / X::ROWS;
    const int64_t rows = (count + blocks - 1) / blocks;
    const char* begin = (const char*)(layer.panels + next.panel * layer.pairs);
    const int64_t size = next.panels * layer.pairs * int64_t(sizeof(Vector));
    const bool fetches = next.panel != task.panel && size <= MOST_LATER;
    const int64_t lines = blocks > 1 ? PANELS / (blocks - 1) : PANELS;
    Later later{begin, begin + (fetches ? size : 0), lines > 1 ? lines : 1};
    std::vector<Vector> partial(layer.pairs > DEPTH ? count * PANELS : 0);
    for (int64_t start = 0; start < layer.pairs; start += DEPTH) {
        for (int64_t row = task.first; row < task.last; row += rows) {
            Vector* own = partial.empty() ? nullptr : &partial[(row - task.first) * PANELS];
            block_of<X::ROWS, PANELS>(smaller(task.last - row, rows), layer, row, task.panel, start,
                                      row == task.first, later, own);
        }
    }
}

// `one_task` for its number of panels, PANELS at most.
template <int PANELS, typename Layer>
void task_of(const Layer& layer, const LinearTask& task, const LinearTask& next) {
    if (task.panels == PANELS)
        one_task<PANELS>(layer, task, next);
    else if constexpr (PANELS > 1)
        task_of<PANELS - 1>(layer, task, next);
}

// Many rows are shared out among threads by chunks, `fewest` of them where there are rows enough; few rows by
// panels, fewer of them towards the end.
inline std::vector<LinearTask> linear_tasks(int64_t rows, int64_t panels, int64_t most, int64_t threads,
                                            int64_t fewest) {
    int64_t chunks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if (chunks < fewest && rows >= fewest * FEWEST_ROWS) chunks = fewest;
    while (chunks * panels < 8 * most * threads && rows / (chunks + 1) >= FEWEST_ROWS) ++chunks;
    std::vector<LinearTask> tasks;
    for (int64_t panel = 0, taken; panel < panels; panel += taken) {
        const int64_t left = panels - panel, fair = chunks > 1 ? most : left / (2 * threads);
        taken = fair < 1 ? 1 : fair > most ? most : fair;
        taken = taken < left ? taken : left;
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            tasks.push_back({rows * chunk / chunks, rows * (chunk + 1) / chunks, panel, taken});
    }
    return tasks;
}

// Tasks that a thread takes together: neighbours, since threads wait for each other that write the same line of
// a cache.
inline int64_t taken_together(int64_t tasks, int64_t threads) {
    return tasks < 16 * threads ? 1 : tasks / (8 * threads);
}

// The task that a thread is likely to compute after one.
inline int64_t task_after(int64_t number, int64_t tasks, int64_t threads, int64_t together) {
    const int64_t next = number + (together > 1 ? 1 : threads);
    return next < tasks ? next : number;
}

template <typename Layer> void linear(const Layer& layer) {
    constexpr int PANELS = Layer::X::PANELS;
    const int64_t threads = omp_get_max_threads();
    const std::vector<LinearTask> tasks = linear_tasks(layer.rows, layer.num_panels(), PANELS, threads, 2);
    const int64_t count = int64_t(tasks.size());
    const int64_t together = taken_together(count, threads);
#pragma omp parallel for schedule(dynamic, together)
    for (int64_t i = 0; i < count; ++i)
        task_of<PANELS>(layer, tasks[i], tasks[task_after(i, count, threads, together)]);
}

typedef int32_t Numbers __attribute__((vector_size(4 * LANES)));

// The largest sum that a thread has found in each lane of a row, and the smallest output that has it.
struct Largest {
    Vector sums;
    Numbers outputs;

    static Largest none() { return {in_all_lanes(-INFINITY), Numbers{} + INT32_MAX}; }

    // Takes from `more` only outputs before `end`. A NaN is never the largest.
    void add(const Largest& more, int32_t end) {
        const Numbers first = (more.sums == sums) & (more.outputs < outputs);
        const Numbers taken = ((more.sums > sums) | first) & (more.outputs < end);
        sums = taken ? more.sums : sums;
        outputs = taken ? more.outputs : outputs;
    }
};

// A linear layer without bias whose sums are not stored.
template <typename T> struct LargestOutputs : Linear<T> {
    Largest* largest;  // [threads][rows]

    template <int ROWS, int PANELS>
    void finish(int64_t row, int64_t panel, const Vector (&sums)[ROWS][PANELS]) const {
        Largest* own = largest + omp_get_thread_num() * this->rows + row;
        Numbers lanes;
        for (int i = 0; i < LANES; ++i) lanes[i] = i;
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANELS; ++p)
                own[r].add({sums[r][p], lanes + int32_t((panel + p) * LANES)}, int32_t(this->outputs));
    }
};

// The output of each row whose sum is largest, of several the smallest; of a row of NaN the last one.
template <typename T> void linear_argmax(const Linear<T>& layer, int64_t* found) {
    const int64_t threads = omp_get_max_threads(), rows = layer.rows, last = layer.outputs - 1;
    std::vector<Largest> largest(threads * rows, Largest::none());
    linear(LargestOutputs<T>{layer, largest.data()});
    for (int64_t row = 0; row < rows; ++row) {
        Largest& own = largest[row];
        for (int64_t t = 1; t < threads; ++t) own.add(largest[t * rows + row], INT32_MAX);
        int best = 0;
        for (int i = 1; i < LANES; ++i) {
            const bool first = own.sums[i] == own.sums[best] && own.outputs[i] < own.outputs[best];
            if (own.sums[i] > own.sums[best] || first) best = i;
        }
        found[row] = smaller(own.outputs[best], last);
    }
}

}  // namespace
