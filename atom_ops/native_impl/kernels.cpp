// Kernels for CPUs, of float32 or bfloat16 values; sums are float32. The Python files next to this one
// say which ops they are, and check what is assumed here.
//
// Compiled for the instructions of the host: see build.py. Loops over features are what the compiler
// vectorizes; OpenMP threads share rows.

#include "attention_few.h"
#include "attention_many.h"
#include "calls.h"
#include "linear.h"
#include "linear_ints.h"
#include "random_words.h"
#include "values.h"

#include <omp.h>
#include <vector>

namespace {

// Factor of a row in its RMS norm.
template <typename T> inline float norm_factor(const T* x, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += number(x[i]) * number(x[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

constexpr int64_t WORTH_THREADS = 16384;  // values, fewer are faster in one thread

template <typename T> inline void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    const float factor = norm_factor(x, size, eps);
    for (int64_t i = 0; i < size; ++i) put(out[i], number(x[i]) * factor * number(weight[i]));
}

// `x_weight`, if it is given, is that of a norm of x before the residual is added.
template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, const T* x_weight, T* out, T* total, int64_t rows,
              int64_t size, float eps) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* own = x + row * size;
        if (residual != nullptr) {
            T* sum = total + row * size;
            if (x_weight != nullptr) {
                norm_row(own, x_weight, sum, size, eps);
                own = sum;
            }
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) put(sum[i], number(own[i]) + number(residual[row * size + i]));
            own = sum;
        }
        if (weight != nullptr) norm_row(own, weight, out + row * size, size, eps);
    }
}

// The argument of the sigmoid in GELU's tanh approximation: twice sqrt(2 / pi) (g + 0.044715 g^3).
template <typename V> inline V gelu_argument(V g) { return 1.5957691216f * g * (1.0f + 0.044715f * g * g); }

// gate times the sigmoid of its argument, rounded, times up.
template <typename T, bool GELU> inline Vector gated(Vector gate, Vector up) {
    const Vector x = GELU ? gelu_argument(gate) : gate;
    const Vector power = power_of_two((x > 0.0f ? -x : x) * LOG2_E);  // at most 1, so that nothing overflows
    return rounded<T>((x > 0.0f ? gate : gate * power) / (1.0f + power)) * up;
}

template <typename T, bool GELU = false> void gate_and_mul(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = x + row * 2 * size, *up = gate + size;
        T* to = out + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            put(to + i, gated<T, GELU>(vector_at(gate + i), vector_at(up + i)));
        if (i == size) continue;
        T last[3][LANES] = {};
        std::memcpy(last[0], gate + i, (size - i) * sizeof(T));
        std::memcpy(last[1], up + i, (size - i) * sizeof(T));
        put(last[2], gated<T, GELU>(vector_at(last[0]), vector_at(last[1])));
        std::memcpy(to + i, last[2], (size - i) * sizeof(T));
    }
}

template <typename T> void silu_and_mul(const T* x, T* out, int64_t rows, int64_t size) {
    gate_and_mul(x, out, rows, size);
}

constexpr int64_t MOST_FEATURES = 256;  // largest head

// One head: its norm, if `weight` is given, then RoPE on the first `rotary` features.
template <typename T>
inline void rope_head(const T* x, const T* weight, const float* cos, const float* sin, T* out, int64_t width,
                      int64_t rotary, float eps) {
    float head[MOST_FEATURES];
    for (int64_t i = 0; i < width; ++i) head[i] = number(x[i]);
    if (weight != nullptr) {
        const float factor = norm_factor(x, width, eps);
        for (int64_t i = 0; i < width; ++i) {
            T rounded;
            put(rounded, head[i] * factor * number(weight[i]));
            head[i] = number(rounded);
        }
    }
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; ++i) put(out[i], head[i] * cos[i] + head[i + half] * sin[i]);
    for (int64_t i = half; i < rotary; ++i) put(out[i], head[i] * cos[i] + head[i - half] * sin[i]);
    for (int64_t i = rotary; i < width; ++i) put(out[i], head[i]);
}

// A token's slot in `kv` holds its key heads, then its value heads.
template <typename T>
void rotate_and_write(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                      int64_t cos_stride, int64_t sin_stride, T* q, T* kv, const int64_t* slots,
                      const T* q_weight, const T* k_weight, int64_t tokens, int64_t heads,
                      int64_t kv_heads, int64_t width, int64_t rotary, float eps) {
#pragma omp parallel for if (tokens * (heads + 2 * kv_heads) * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token) {
        const T* x = qkv + token * qkv_stride;
        const float *token_cos = cos + token * cos_stride, *token_sin = sin + token * sin_stride;
        T* queries = q + token * heads * width;
        for (int64_t head = 0; head < heads; ++head, x += width)
            rope_head(x, q_weight, token_cos, token_sin, queries + head * width, width, rotary, eps);
        if (slots[token] < 0) continue;  // padding
        T* keys = kv + slots[token] * 2 * kv_heads * width;
        for (int64_t head = 0; head < kv_heads; ++head, x += width)
            rope_head(x, k_weight, token_cos, token_sin, keys + head * width, width, rotary, eps);
        std::memcpy(keys + kv_heads * width, x, kv_heads * width * sizeof(T));
    }
}

// What one thread computes at a time: queries of one row, either all of them for `kv_heads` key/value
// heads from `kv_head` on, or the tile of one key/value head that starts with query number `from`.
struct Task {
    int64_t row, kv_head, kv_heads, from;
};

constexpr int64_t FEW_QUERIES = 4;  // tokens of a row; with more, tiles are faster
constexpr int64_t NO_TILE = -1;

// Tiles have `at_once` queries at most. Without them a task has several key/value heads of a row, which are next to
// one another in memory: all of them, unless that were more than half of a thread's share.
inline std::vector<Task> attention_tasks(const int32_t* starts, const int32_t* contexts, int64_t rows,
                                         int64_t kv_heads, int64_t group, int64_t at_once) {
    const int64_t threads = omp_get_max_threads(), shares = threads == 1 ? 1 : 2 * threads;
    int64_t all = 0;  // tokens to be read; one more for each row, so that none has nothing
    for (int64_t row = 0; row < rows; ++row)
        if (starts[row + 1] - starts[row] <= FEW_QUERIES) all += contexts[row] + 1;
    std::vector<Task> tasks;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t tokens = starts[row + 1] - starts[row];
        if (tokens > FEW_QUERIES) {
            // The last tiles first: they see most.
            for (int64_t tile = (tokens * group - 1) / at_once; tile >= 0; --tile)
                for (int64_t head = 0; head < kv_heads; ++head)
                    tasks.push_back({row, head, 1, tile * at_once});
        } else if (tokens > 0) {
            const int64_t fair = kv_heads * all / (shares * (contexts[row] + 1));
            const int64_t together = smaller(fair < 1 ? 1 : fair, kv_heads);
            for (int64_t head = 0; head < kv_heads; head += together)
                tasks.push_back({row, head, smaller(together, kv_heads - head), NO_TILE});
        }
    }
    return tasks;
}

constexpr int64_t TASKS_A_THREAD = 4;  // some take longer than others

// Queries of a tile, of `all` queries of a step. With AMX more of them share what is done once for a tile's
// keys and values, as long as each thread has some tiles.
template <typename T> int64_t queries_at_once(int64_t all) {
    if (!by_tiles<T>()) return MANY_QUERIES;
    const int64_t share = all / (TASKS_A_THREAD * omp_get_max_threads());
    return smaller((share / MANY_QUERIES + 1) * MANY_QUERIES, MOST_TILED_QUERIES);
}

template <typename T, int WIDTH>
void attend_rows(const T* q, int64_t q_stride, const T* kv, const int32_t* table, int64_t table_stride,
                 const int32_t* contexts, const int32_t* starts, const int32_t* ahead, const T* sinks, T* out,
                 int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t block_size,
                 int64_t window, bool chunked, Scores rule) {
    const int64_t group = heads / kv_heads;
    std::memset(out, 0, tokens * heads * WIDTH * sizeof(T));  // padding tokens get zeros
    const int64_t at_once = queries_at_once<T>(tokens * heads);
    const std::vector<Task> tasks = attention_tasks(starts, contexts, rows, kv_heads, group, at_once);
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t number = 0; number < tasks.size(); ++number) {
        const Task& task = tasks[number];
        const int64_t head = task.kv_head * group, token = starts[task.row];
        const int64_t count = starts[task.row + 1] - token;
        const Context<T> context{kv + task.kv_head * WIDTH, table + task.row * table_stride, block_size,
                                 2 * kv_heads * WIDTH, kv_heads * WIDTH};
        const Queries<T> queries{q + token * q_stride + head * WIDTH,
                                 q_stride,
                                 out + (token * heads + head) * WIDTH,
                                 heads * WIDTH,
                                 sinks == nullptr ? nullptr : sinks + head,
                                 group,
                                 count,
                                 contexts[task.row] - count,
                                 window,
                                 chunked,
                                 ahead == nullptr ? nullptr : ahead + token};
        if (task.from == NO_TILE)
            attend_each<T, WIDTH>(queries, context, rule, task.kv_heads);
        else
            attend_tile<T, WIDTH>(queries, context, rule, task.from, at_once);
    }
}

}  // namespace

// Compiled once for each type of values, ATOM_DTYPE.
typedef float float32;
typedef BFloat16 bfloat16;
typedef ATOM_DTYPE T;
#define JOINED(one, other) one##_##other
#define JOIN(one, other) JOINED(one, other)
#define KERNEL(name) static void run_##name
#define IS_BFLOAT16_float32 0
#define IS_BFLOAT16_bfloat16 1

KERNEL(rms_norm)(const void* x, const void* residual, const void* weight, const void* x_weight, void* out,
                 void* total, int64_t rows, int64_t size, float eps) {
    rms_norm((const T*)x, (const T*)residual, (const T*)weight, (const T*)x_weight, (T*)out, (T*)total, rows,
             size, eps);
}

KERNEL(silu_and_mul)(const void* x, void* out, int64_t rows, int64_t size) {
    silu_and_mul((const T*)x, (T*)out, rows, size);
}

KERNEL(gelu_tanh_and_mul)(const void* x, void* out, int64_t rows, int64_t size) {
    gate_and_mul<T, true>((const T*)x, (T*)out, rows, size);
}

KERNEL(rotate_and_write)(const void* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                         int64_t cos_stride, int64_t sin_stride, void* q, void* kv, const int64_t* slots,
                         const void* q_weight, const void* k_weight, int64_t tokens, int64_t heads,
                         int64_t kv_heads, int64_t width, int64_t rotary, float eps) {
    rotate_and_write((const T*)qkv, qkv_stride, cos, sin, cos_stride, sin_stride, (T*)q, (T*)kv, slots,
                     (const T*)q_weight, (const T*)k_weight, tokens, heads, kv_heads, width, rotary, eps);
}

#define ATTEND(WIDTH)                                                                                      \
    case WIDTH:                                                                                            \
        return attend_rows<T, WIDTH>((const T*)q, q_stride, (const T*)kv, table, table_stride, contexts,   \
                                     starts, ahead, (const T*)sinks, (T*)out, rows, tokens, heads,         \
                                     kv_heads, block_size, window, chunked != 0, Scores{scale, cap});

KERNEL(attend)(const void* q, int64_t q_stride, const void* kv, const int32_t* table, int64_t table_stride,
               const int32_t* contexts, const int32_t* starts, const int32_t* ahead, const void* sinks,
               void* out, int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
               int64_t block_size, int64_t window, int64_t chunked, float scale, float cap) {
    switch (width) { ATTEND(16) ATTEND(64) ATTEND(80) ATTEND(128) ATTEND(256) }
}

#if !JOIN(IS_BFLOAT16, ATOM_DTYPE)
KERNEL(random_words)(const int64_t* seeds, const int64_t* sequences, const int64_t* positions,
                     int64_t purpose, const void* needed, float* out, int64_t rows, int64_t blocks) {
    random_words(seeds, sequences, positions, purpose, (const uint32_t*)needed, out, rows, blocks);
}
#endif

// Plain bfloat16 matrices are torch's without AVX-512's instruction, and with AMX, where oneDNN is faster.
#if JOIN(IS_BFLOAT16, ATOM_DTYPE) && (!defined(__AVX512BF16__) || defined(__AMX_BF16__))
#define HAS_NO_LINEAR
#endif

#ifndef HAS_NO_LINEAR
KERNEL(linear)(const void* x, const void* panels, const void* bias, void* out, int64_t rows,
               int64_t outputs, int64_t inputs, int64_t in_float32) {
    linear(Linear<T>{{(const Pair<T>*)x, (const T*)bias, out, in_float32 != 0, rows, outputs, inputs / 2},
                     (const Vector*)panels});
}

KERNEL(linear_argmax)(const void* x, const void* panels, int64_t* found, int64_t rows, int64_t outputs,
                      int64_t inputs) {
    linear_argmax(
        Linear<T>{{(const Pair<T>*)x, nullptr, nullptr, true, rows, outputs, inputs / 2}, (const Vector*)panels},
        found);
}

KERNEL(norm_linear)(const void* x, const void* residual, const void* weight, void* normed, void* total,
                    const void* panels, const void* bias, void* out, int64_t rows, int64_t outputs,
                    int64_t inputs, float eps) {
    rms_norm((const T*)x, (const T*)residual, (const T*)weight, (const T*)nullptr, (T*)normed, (T*)total, rows,
             inputs, eps);
    run_linear(normed, panels, bias, out, rows, outputs, inputs, false);
}

KERNEL(silu_linear)(const void* x, void* gated, const void* panels, const void* bias, void* out,
                    int64_t rows, int64_t outputs, int64_t inputs) {
    silu_and_mul((const T*)x, (T*)gated, rows, inputs);
    run_linear(gated, panels, bias, out, rows, outputs, inputs, false);
}
#endif

KERNEL(linear_ints)(const void* x, const void* words, const void* terms, const void* units,
                    const void* bias, void* out, int64_t rows, int64_t outputs, int64_t inputs,
                    int64_t bits, int64_t group, int64_t block, int64_t has_offsets, int64_t wide_terms,
                    int64_t in_float32) {
    linear_ints(
        IntLinear<T>{{nullptr, (const T*)bias, out, in_float32 != 0, rows, outputs, inputs / 2},
                     (const Words*)words,
                     terms,
                     (const uint16_t*)units,
                     group / 2,
                     inputs / group,
                     units != nullptr ? block / group : 0,
                     int(bits),
                     has_offsets != 0,
                     wide_terms != 0},
        (const T*)x);
}

KERNEL(norm_linear_ints)(const void* x, const void* residual, const void* weight, void* normed, void* total,
                         const void* words, const void* terms, const void* units, const void* bias, void* out,
                         int64_t rows, int64_t outputs, int64_t inputs, int64_t bits, int64_t group,
                         int64_t block, int64_t has_offsets, int64_t wide_terms, float eps) {
    rms_norm((const T*)x, (const T*)residual, (const T*)weight, (const T*)nullptr, (T*)normed, (T*)total, rows,
             inputs, eps);
    run_linear_ints(normed, words, terms, units, bias, out, rows, outputs, inputs, bits,
                                       group, block, has_offsets, wide_terms, false);
}

KERNEL(silu_linear_ints)(const void* x, void* gated, const void* words, const void* terms, const void* units,
                         const void* bias, void* out, int64_t rows, int64_t outputs, int64_t inputs,
                         int64_t bits, int64_t group, int64_t block, int64_t has_offsets, int64_t wide_terms) {
    silu_and_mul((const T*)x, (T*)gated, rows, inputs);
    run_linear_ints(gated, words, terms, units, bias, out, rows, outputs, inputs, bits,
                                       group, block, has_offsets, wide_terms, false);
}

#define ENTRY(name) Kernel{#name, Packed<&run_##name>::LETTERS, Packed<&run_##name>::run}

// The kernels for these values; one without a name ends them.
extern "C" const Kernel JOIN(atom_kernels, ATOM_DTYPE)[] = {
    ENTRY(rms_norm),
    ENTRY(silu_and_mul),
    ENTRY(gelu_tanh_and_mul),
    ENTRY(rotate_and_write),
    ENTRY(attend),
    ENTRY(linear_ints),
    ENTRY(norm_linear_ints),
    ENTRY(silu_linear_ints),
#ifndef HAS_NO_LINEAR
    ENTRY(linear),
    ENTRY(linear_argmax),
    ENTRY(norm_linear),
    ENTRY(silu_linear),
#endif
#if !JOIN(IS_BFLOAT16, ATOM_DTYPE)
    ENTRY(random_words),
#endif
    Kernel{},
};

#if JOIN(IS_BFLOAT16, ATOM_DTYPE)
extern "C" int64_t atom_lanes() { return LANES; }
extern "C" int64_t atom_has_tiles() { return has_tiles(); }
extern "C" void atom_run(const Call* calls, int64_t count) {
    for (const Call* call = calls; call < calls + count; ++call) call->run(call->words);
}
#endif
