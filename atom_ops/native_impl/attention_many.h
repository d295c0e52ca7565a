// Attention of a row with many queries: tiles of queries against chunks of keys.
//
// Queries are the lanes of vectors, so that nothing is summed across lanes:
//
//     scores[key][query]     =  keys[key][feature] * queries[feature][query], summed over features
//     sums[feature][query]  +=  values[key][feature] * weights[key][query], summed over keys
//
// Both are `multiply` with a left side of words, which are broadcast, and a right side of vectors. A
// word is a float32 value, or two neighbours in bfloat16 where the CPU multiplies pairs.

#pragma once

#include "attention_few.h"
#include "values.h"

namespace {

// Words of one float32 value.
template <typename T> struct Products {
    typedef float Word;
    static constexpr int VALUES = 1;

    static Vector add(Vector sum, Word left, Vector right) { return sum + left * right; }

    static void load(const T* x, Word* words, int width) {
        for (int i = 0; i < width; ++i) words[i] = number(x[i]);
    }

    static void join(const T* x, const T*, Word* words, int width) { load(x, words, width); }

    static void weigh(const float* x, const float*, Word* words, int lanes) {
        for (int i = 0; i < lanes; ++i) words[i] = x[i];
    }
};

#ifdef __AVX512BF16__
// Words of two values.
template <> struct Products<BFloat16> {
    typedef uint32_t Word;
    static constexpr int VALUES = 2;

    static Vector add(Vector sum, Word left, Vector right) {
        return add_pairs(sum, in_all_lanes(left), right);
    }

    static void load(const BFloat16* x, Word* words, int width) { std::memcpy(words, x, width * sizeof *x); }

    static void join(const BFloat16* x, const BFloat16* next, Word* words, int width) {
        for (int i = 0; i < width; ++i) words[i] = Word(x[i].bits) | Word(next[i].bits) << 16;
    }

    static void weigh(const float* x, const float* next, Word* words, int lanes) {
        for (int i = 0; i < lanes; ++i) {
            BFloat16 low, high;
            put(low, x[i]);
            put(high, next[i]);
            words[i] = Word(low.bits) | Word(high.bits) << 16;
        }
    }
};
#endif

#ifdef __AVX512F__
constexpr int AT_ONCE = 4;  // vectors of queries whose sums of four rows are in registers
#else
constexpr int AT_ONCE = 2;
#endif
constexpr int ROWS = 4;
constexpr int KEYS = 64;  // in one iteration of the online softmax
constexpr int MANY_QUERIES = 4 * LANES;  // most queries of a tile
constexpr float LEAST_SCORE = -1.0e30f;

// out[row][vector] = sum of left[row][k] * right[k][vector], and with `factor` of what `out` held.
// `rows` is a multiple of ROWS.
template <typename P, int VECTORS>
inline void multiply(const typename P::Word* left, int64_t row_stride, int64_t k_stride, const Vector* right,
                     int depth, Vector* out, int rows, const Vector* factor) {
    constexpr int TAKEN = VECTORS % AT_ONCE == 0 ? AT_ONCE : AT_ONCE > VECTORS ? VECTORS : 1;
    for (int row = 0; row < rows; row += ROWS) {
        for (int from = 0; from < VECTORS; from += TAKEN) {
            const typename P::Word* words = left + row * row_stride;
            Vector* to = out + row * VECTORS + from;
            Vector sums[ROWS][TAKEN] = {};
            if (factor != nullptr)
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < TAKEN; ++v) sums[r][v] = to[r * VECTORS + v] * factor[from + v];
            for (int k = 0; k < depth; ++k, words += k_stride)
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < TAKEN; ++v)
                        sums[r][v] =
                            P::add(sums[r][v], words[r * row_stride], right[k * VECTORS + from + v]);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < TAKEN; ++v) to[r * VECTORS + v] = sums[r][v];
        }
    }
}

// The online softmax of queries in lanes; `first` ... `last` is what each sees of its context.
template <int SIZE> struct LaneSoftmax {
    float top[SIZE], total[SIZE];
    int32_t first[SIZE], last[SIZE];

    // Weights of a chunk's scores, in their place, and the factors of earlier sums.
    void add(float* scores, int64_t start, int count, float scale, bool all_seen, float* factor) {
        float best[SIZE];
        for (int i = 0; i < SIZE; ++i) best[i] = top[i];
        for (int key = 0; key < count; ++key) {
            float* own = scores + key * SIZE;
            const int32_t token = int32_t(start) + key;
            for (int i = 0; i < SIZE; ++i) {
                const bool seen = all_seen || (token >= first[i] && token <= last[i]);
                own[i] = seen ? own[i] * scale : LEAST_SCORE;
                best[i] = own[i] > best[i] ? own[i] : best[i];
            }
        }
        for (int i = 0; i < SIZE; ++i) {
            factor[i] = exponential(top[i] - best[i]);
            total[i] *= factor[i];
            top[i] = best[i];
        }
        for (int key = 0; key < count; ++key) {
            float* own = scores + key * SIZE;
            for (int i = 0; i < SIZE; ++i) {
                own[i] = exponential(own[i] - best[i]);
                total[i] += own[i];
            }
        }
    }
};

// VECTORS * LANES queries of one key/value head, number `from` and those after it; numbers go through the
// heads of a token, then the tokens.
template <typename T, int WIDTH, int VECTORS>
void attend_tile(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t from) {
    typedef Products<T> P;
    typedef typename P::Word Word;
    constexpr int SIZE = VECTORS * LANES;
    const int64_t all = queries.count * queries.group;
    const int filled = smaller(all - from, SIZE);

    alignas(64) Word right[WIDTH / P::VALUES][SIZE] = {};
    LaneSoftmax<SIZE> softmax;
    for (int i = 0; i < SIZE; ++i) {
        const int64_t query = from + (i < filled ? i : filled - 1);  // the last one again in lanes left over
        Word own[WIDTH];
        P::load(queries.in(query / queries.group) + query % queries.group * WIDTH, own, WIDTH);
        for (int word = 0; word < WIDTH / P::VALUES; ++word) right[word][i] = own[word];
        softmax.last[i] = int32_t(queries.last(query / queries.group));
        softmax.first[i] = int32_t(queries.first(query / queries.group));
        softmax.top[i] = LEAST_SCORE;
        softmax.total[i] = 0.0f;
    }

    Vector sums[WIDTH * VECTORS] = {};
    alignas(64) Word keys[KEYS][WIDTH / P::VALUES], values[KEYS / P::VALUES][WIDTH];
    alignas(64) Word weights[KEYS / P::VALUES][SIZE];
    alignas(64) float scores[KEYS][SIZE], factor[SIZE];
    const T* places[KEYS];
    const int64_t last = softmax.last[SIZE - 1];
    for (int64_t start = softmax.first[0]; start <= last; start += KEYS) {
        const int count = smaller(last - start + 1, KEYS);
        const int rows = (count + ROWS - 1) / ROWS * ROWS;
        context.find(start, count, places);
        for (int token = 0; token < count; ++token) P::load(places[token], keys[token], WIDTH);
        std::memset(keys[count], 0, (rows - count) * sizeof keys[0]);
        multiply<P, VECTORS>(keys[0], WIDTH / P::VALUES, 1, (const Vector*)right, WIDTH / P::VALUES,
                             (Vector*)scores, rows, nullptr);
        const bool all_seen = start >= softmax.first[SIZE - 1] && start + count - 1 <= softmax.last[0];
        float scale = rule.scale;
        if (rule.cap > 0.0f) {
            rule.apply_cap(scores[0], count * SIZE, scale);
            scale = 1.0f;
        }
        softmax.add(scores[0], start, count, scale, all_seen, factor);
        for (int key = 0; key < count; key += P::VALUES) {
            // A word of the last key alone has it twice, the second time with weight 0.
            const int next = key + P::VALUES - 1 < count ? key + P::VALUES - 1 : key;
            if (next == key && P::VALUES > 1) std::memset(scores[key + 1], 0, sizeof scores[0]);
            P::weigh(scores[key], scores[key + P::VALUES - 1], weights[key / P::VALUES], SIZE);
            P::join(places[key] + context.value_offset, places[next] + context.value_offset,
                    values[key / P::VALUES], WIDTH);
        }
        multiply<P, VECTORS>(values[0], 1, WIDTH, (const Vector*)weights, (count + P::VALUES - 1) / P::VALUES,
                             sums, WIDTH, (const Vector*)factor);
    }

    const float* summed = (const float*)sums;
    for (int i = 0; i < filled; ++i) {
        const int64_t token = (from + i) / queries.group, head = (from + i) % queries.group;
        float rescale = 1.0f, total = softmax.total[i];
        if (queries.sinks != nullptr) {
            const float sink = number(queries.sinks[head]);
            const float top = sink > softmax.top[i] ? sink : softmax.top[i];
            rescale = exponential(softmax.top[i] - top);
            total = total * rescale + exponential(sink - top);
        }
        T* out = queries.result(token) + head * WIDTH;
        for (int feature = 0; feature < WIDTH; ++feature)
            put(out[feature], summed[feature * SIZE + i] * (rescale / total));
    }
}

// The tile that starts with query number `from`.
template <typename T, int WIDTH>
void attend_tile(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t from) {
    const int64_t left = queries.count * queries.group - from;
    if (left > 3 * LANES) return attend_tile<T, WIDTH, 4>(queries, context, rule, from);
    if (left > 2 * LANES) return attend_tile<T, WIDTH, 3>(queries, context, rule, from);
    if (left > LANES) return attend_tile<T, WIDTH, 2>(queries, context, rule, from);
    return attend_tile<T, WIDTH, 1>(queries, context, rule, from);
}

}  // namespace
