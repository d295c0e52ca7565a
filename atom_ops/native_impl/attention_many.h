// Attention of a row with many queries: tiles of queries against chunks of keys.
//
// Queries are the lanes of vectors, so that nothing is summed across lanes:
//
//     scores[key][query]     =  keys[key][feature] * queries[feature][query], summed over features
//     sums[feature][query]  +=  values[key][feature] * weights[key][query], summed over keys
//
// Both are `multiply` with a left side of words, which are broadcast, and a right side of vectors. A
// word is a float32 value, or two neighbours in bfloat16 where the CPU multiplies pairs. With AMX, bfloat16 is
// in attention_tiles.h.

#pragma once

#include "attention_few.h"
#include "attention_tiles.h"
#include "lane_softmax.h"
#include "values.h"

#include <type_traits>

namespace {

#ifdef __AVX512F__
constexpr int AT_ONCE = 4;  // vectors of queries whose sums of four rows are in registers
#else
constexpr int AT_ONCE = 2;
#endif
constexpr int ROWS = 4;
constexpr int KEYS = 64;  // in one iteration of the online softmax
constexpr int MANY_QUERIES = 4 * LANES;  // most queries of a tile, without AMX

// Whether AMX multiplies values of this type.
template <typename T> inline bool by_tiles() { return std::is_same<T, BFloat16>::value && has_tiles(); }

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

// VECTORS * LANES queries of one key/value head, number `from` and those after it; numbers go through the
// heads of a token, then the tokens.
template <typename T, int WIDTH, int VECTORS>
void attend_vectors(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t from) {
    typedef Products<T> P;
    typedef typename P::Word Word;
    constexpr int SIZE = VECTORS * LANES;
    const int filled = smaller(queries.count * queries.group - from, SIZE);

    alignas(64) Word right[WIDTH / P::VALUES][SIZE] = {};
    for (int i = 0; i < SIZE; ++i) {
        Word own[WIDTH];
        P::load(queries.in(from + i, WIDTH), own, WIDTH);
        for (int word = 0; word < WIDTH / P::VALUES; ++word) right[word][i] = own[word];
    }

    Vector sums[WIDTH * VECTORS] = {};
    alignas(64) Word keys[KEYS][WIDTH / P::VALUES], values[KEYS / P::VALUES][WIDTH];
    Vector scores[KEYS][VECTORS], weights[KEYS / P::VALUES][VECTORS], rescale[VECTORS];
    LaneSoftmax softmax[VECTORS];
    for (int v = 0; v < VECTORS; ++v) softmax[v].begin(queries, from + v * LANES);
    const T* places[KEYS];
    const int64_t last = softmax[VECTORS - 1].most();
    for (int64_t start = softmax[0].least(); start <= last; start += KEYS) {
        const int count = smaller(last - start + 1, KEYS);
        const int rows = (count + ROWS - 1) / ROWS * ROWS;
        context.find(start, count, places);
        for (int token = 0; token < count; ++token) P::load(places[token], keys[token], WIDTH);
        std::memset(keys[count], 0, (rows - count) * sizeof keys[0]);
        multiply<P, VECTORS>(keys[0], WIDTH / P::VALUES, 1, (const Vector*)right, WIDTH / P::VALUES,
                             scores[0], rows, nullptr);
        const float factor = rule.base_two((float*)scores, count * SIZE);
        for (int v = 0; v < VECTORS; ++v) {
            softmax[v].hide(scores[0] + v, VECTORS, start, count);
            rescale[v] = softmax[v].raise(scores[0] + v, VECTORS, count, factor);
            Vector added = {};
            for (int key = 0; key < count; ++key)
                added += scores[key][v] = softmax[v].weight(scores[key][v], factor);
            softmax[v].total += added;
        }
        for (int key = 0; key < count; key += P::VALUES) {
            // A word of the last key alone has it twice, the second time with weight 0.
            const int next = key + P::VALUES - 1 < count ? key + P::VALUES - 1 : key;
            if (next == key && P::VALUES > 1) std::memset(scores[key + 1], 0, sizeof scores[0]);
            for (int v = 0; v < VECTORS; ++v)
                weights[key / P::VALUES][v] = P::joined(scores[key][v], scores[key + P::VALUES - 1][v]);
            P::join(places[key] + context.value_offset, places[next] + context.value_offset,
                    values[key / P::VALUES], WIDTH);
        }
        multiply<P, VECTORS>(values[0], 1, WIDTH, weights[0], (count + P::VALUES - 1) / P::VALUES,
                             sums, WIDTH, rescale);
    }

    for (int v = 0; v < VECTORS; ++v) rescale[v] = softmax[v].finish(queries, from + v * LANES);
    for (int i = 0; i < filled; ++i) {
        T* out = queries.result(from + i, WIDTH);
        for (int feature = 0; feature < WIDTH; ++feature)
            put(out[feature], ((const float*)sums)[feature * SIZE + i] * ((const float*)rescale)[i]);
    }
}

// The tile of `at_once` queries that starts with number `from`, or of those that are left.
template <typename T, int WIDTH>
void attend_tile(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t from,
                 int64_t at_once) {
    const int count = smaller(queries.count * queries.group - from, at_once);
#ifdef __AMX_BF16__
    if constexpr (std::is_same<T, BFloat16>::value)
        if (by_tiles<T>()) return attend_by_tiles<WIDTH>(queries, context, rule, from, count);
#endif
    switch ((count + LANES - 1) / LANES) {
        case 1: return attend_vectors<T, WIDTH, 1>(queries, context, rule, from);
        case 2: return attend_vectors<T, WIDTH, 2>(queries, context, rule, from);
        case 3: return attend_vectors<T, WIDTH, 3>(queries, context, rule, from);
        default: return attend_vectors<T, WIDTH, 4>(queries, context, rule, from);
    }
}

}  // namespace
