// Attention of a row with few queries: each reads keys and values where they are.

#pragma once

#include "values.h"

#include <vector>

namespace {

// Where the tokens of a context are: one layer's cache, and the row of the block table.
template <typename T> struct Context {
    const T* kv;  // the cache from the first key/value head on
    const int32_t* table;
    int64_t block_size, token_stride, value_offset;

    // The keys of `count` tokens from `start` on.
    void find(int64_t start, int count, const T** keys) const {
        int64_t block = start / block_size, offset = start % block_size;
        for (int token = 0; token < count; ++token) {
            keys[token] = kv + (table[block] * block_size + offset) * token_stride;
            if (++offset == block_size) ++block, offset = 0;
        }
    }
};

// The queries of one row: `count` tokens, which are the last ones of its context; `group` query heads for
// each key/value head.
template <typename T> struct Queries {
    const T* q;
    int64_t q_stride;
    T* out;
    int64_t out_stride;
    const T* sinks;
    int64_t group, count;
    int64_t position;  // the first token's, in the context
    int64_t window;
    bool chunked;  // the window begins at its last multiple
    const int32_t* ahead;  // tokens after its own that each token sees; null: none

    const T* in(int64_t token) const { return q + token * q_stride; }
    T* result(int64_t token) const { return out + token * out_stride; }
    // By their number, which goes through the heads of a token, then the tokens; the last query for more.
    const T* in(int64_t number, int64_t width) const {
        const int64_t own = smaller(number, count * group - 1);
        return in(own / group) + own % group * width;
    }
    T* result(int64_t number, int64_t width) const { return result(number / group) + number % group * width; }
    // What a token sees of the context.
    int64_t last(int64_t token) const { return position + token + (ahead == nullptr ? 0 : ahead[token]); }
    int64_t first(int64_t token) const {
        const int64_t own = position + token;
        if (window > 0 && chunked) return own / window * window;
        return window > 0 && own >= window ? own - window + 1 : 0;
    }
};

// Scores s become scale * s, and with a cap then cap * tanh(scale * s / cap).
struct Scores {
    float scale, cap;

    // To `count` scores, in whole vectors.
    void apply_cap(float* scores, int count, float factor) const {
        const float doubled = 2.0f * LOG2_E * factor / cap;
        for (int i = 0; i < count; i += LANES) {
            const Vector x = doubled * vector_at(scores + i);
            const Vector power = power_of_two(x > 0.0f ? -x : x);  // at most 1, so that nothing overflows
            const Vector capped = cap * (1.0f - power) / (1.0f + power);
            put(scores + i, x > 0.0f ? capped : -capped);
        }
    }

    // Applies the cap; the result is the factor with which weights are powers of two.
    float base_two(float* scores, int count) const {
        if (cap <= 0.0f) return LOG2_E * scale;
        apply_cap(scores, count, scale);
        return LOG2_E;
    }
};

constexpr int CHUNK = 32;    // tokens of one iteration of the online softmax
constexpr int AHEAD = 32;    // tokens whose keys are fetched before they are needed
constexpr int TOGETHER = 4;  // tokens whose scores are summed together
constexpr int HEADS = 4;     // query heads that read keys and values together
constexpr int PARTIAL = LANES / 4;  // vectors of a value's features that are summed in registers

// The online softmax of one query: weights of a chunk's scores, and the factor of earlier sums.
struct Softmax {
    float top = -1.0e30f, total = 0.0f;

    float add(float* scores, int count) {
        float new_top = top;
#pragma omp simd reduction(max : new_top)
        for (int token = 0; token < count; ++token)
            new_top = scores[token] > new_top ? scores[token] : new_top;
        const float rescale = exponential(top - new_top);
        top = new_top;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int token = 0; token < count; ++token) {
            scores[token] = exponential(scores[token] - new_top);
            sum += scores[token];
        }
        total = total * rescale + sum;
        return rescale;
    }
};

// What one query head of one token has seen of its context.
template <int WIDTH> struct HeadState {
    Softmax softmax;
    Vector sum[WIDTH / LANES] = {};
};

// A query head, for products with keys, whose lanes are still to be summed; PAIRS: where there are
// instructions for pairs of its type, it is read by them.
template <typename T, int WIDTH, bool PAIRS> struct Query {
    Vector parts[WIDTH / LANES];

    struct Key {
        Vector parts[WIDTH / LANES];

        explicit Key(const T* key) {
            for (int i = 0; i < WIDTH / LANES; ++i) parts[i] = vector_at(key + i * LANES);
        }
    };

    void load(const T* q) {
        for (int i = 0; i < WIDTH / LANES; ++i) parts[i] = vector_at(q + i * LANES);
    }
    Vector times(const Key& key) const {
        Vector sum = {};
        for (int i = 0; i < WIDTH / LANES; ++i) sum += parts[i] * key.parts[i];
        return sum;
    }
};

#ifdef __AVX512BF16__
template <int WIDTH> struct Query<BFloat16, WIDTH, true> {
    static constexpr int PARTS = WIDTH / (2 * LANES);
    Vector parts[PARTS];

    struct Key {
        Vector parts[PARTS];

        explicit Key(const BFloat16* key) { std::memcpy(parts, key, sizeof parts); }
    };

    void load(const BFloat16* q) { std::memcpy(parts, q, sizeof parts); }
    Vector times(const Key& key) const {
        Vector sum = {};
        for (int i = 0; i < PARTS; ++i) sum = add_pairs(sum, parts[i], key.parts[i]);
        return sum;
    }
};
#endif

// COUNT query heads of one key/value head over the keys and values of `count` tokens, rounded up to
// TOGETHER; `keys` has AHEAD more, to be fetched.
template <typename T, int WIDTH, int COUNT>
void attend(const T* q, const T* const* keys, int64_t value_offset, int count, Scores rule,
            HeadState<WIDTH>* states) {
    constexpr int PARTS = WIDTH / LANES, LINE = 64 / int(sizeof(T));
    typedef Query<T, WIDTH, WIDTH % (2 * LANES) == 0> HeadQuery;
    float scores[COUNT][CHUNK] = {};
    HeadQuery queries[COUNT];
    for (int n = 0; n < COUNT; ++n) queries[n].load(q + n * WIDTH);
    for (int token = 0; token < count; token += TOGETHER) {
        const T* const* four = keys + token;
        typedef typename HeadQuery::Key Key;
        const Key known[] = {Key(four[0]), Key(four[1]), Key(four[2]), Key(four[3])};
        for (int n = 0; n < COUNT; ++n) {
            // A part of what is fetched with each head, so that memory always has some to do.
            for (int t = n * TOGETHER / COUNT; t < (n + 1) * TOGETHER / COUNT; ++t) {
                for (int i = 0; i < WIDTH; i += LINE) __builtin_prefetch(four[t] + value_offset + i, 0, 2);
                for (int i = 0; i < WIDTH; i += LINE) __builtin_prefetch(four[t + AHEAD] + i, 0, 2);
            }
            const HeadQuery& query = queries[n];
            const Quarter sums = rule.scale * sums_of(query.times(known[0]), query.times(known[1]),
                                                 query.times(known[2]), query.times(known[3]));
            std::memcpy(&scores[n][token], &sums, sizeof sums);
        }
    }
    for (int n = 0; n < COUNT; ++n) {
        if (rule.cap > 0.0f) rule.apply_cap(scores[n], count, 1.0f);
        const float rescale = states[n].softmax.add(scores[n], count);
        for (int i = 0; i < PARTS; ++i) states[n].sum[i] *= rescale;
    }
    for (int from = 0; from < PARTS; from += PARTIAL) {
        const int parts = PARTS - from < PARTIAL ? PARTS - from : PARTIAL;
        Vector added[COUNT][PARTIAL] = {};
        for (int token = 0; token < count; ++token) {
            const T* value = keys[token] + value_offset + from * LANES;
            for (int i = 0; i < parts; ++i) {
                const Vector part = vector_at(value + i * LANES);
                for (int n = 0; n < COUNT; ++n) added[n][i] += scores[n][token] * part;
            }
        }
        for (int n = 0; n < COUNT; ++n)
            for (int i = 0; i < parts; ++i) states[n].sum[from + i] += added[n][i];
    }
}

template <typename T, int WIDTH>
void attend_group(const T* q, const T* const* keys, int64_t value_offset, int count, Scores rule,
                  HeadState<WIDTH>* states, int64_t heads) {
    while (heads > 0) {
        const int64_t taken = heads < HEADS ? heads : HEADS;
        switch (taken) {
            case 1: attend<T, WIDTH, 1>(q, keys, value_offset, count, rule, states); break;
            case 2: attend<T, WIDTH, 2>(q, keys, value_offset, count, rule, states); break;
            case 3: attend<T, WIDTH, 3>(q, keys, value_offset, count, rule, states); break;
            default: attend<T, WIDTH, HEADS>(q, keys, value_offset, count, rule, states);
        }
        q += taken * WIDTH, states += taken, heads -= taken;
    }
}

// The output of a head.
template <typename T, int WIDTH> void finish(HeadState<WIDTH>& state, const T* sink, T* out) {
    float rescale = 1.0f;
    if (sink != nullptr) {
        float score = number(*sink);
        rescale = state.softmax.add(&score, 1);
    }
    const float factor = state.softmax.total > 0.0f ? rescale / state.softmax.total : 0.0f;
    for (int i = 0; i < WIDTH / LANES; ++i) {
        const Vector part = state.sum[i] * factor;
        for (int lane = 0; lane < LANES; ++lane) put(out[i * LANES + lane], part[lane]);
    }
}

// Each token with the query heads of `kv_heads` key/value heads. All of them take a chunk before the next
// one, so that memory is read in its order.
template <typename T, int WIDTH>
void attend_each(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t kv_heads) {
    const int64_t group = queries.group;
    const T* keys[CHUNK + AHEAD];
    for (int64_t token = 0; token < queries.count; ++token) {
        std::vector<HeadState<WIDTH>> states(group * kv_heads);
        const int64_t last = queries.last(token);
        for (int64_t start = queries.first(token); start <= last; start += CHUNK) {
            const int count = smaller(last - start + 1, CHUNK);
            const int known = smaller(last - start + 1, CHUNK + AHEAD);
            const int filled = (count + TOGETHER - 1) / TOGETHER * TOGETHER + AHEAD;
            context.find(start, known, keys);
            for (int n = known; n < filled; ++n) keys[n] = keys[known - 1];
            for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
                attend_group<T, WIDTH>(queries.in(token) + kv_head * group * WIDTH, keys,
                                       context.value_offset, count, rule, states.data() + kv_head * group,
                                       group);
                for (int n = 0; n < filled; ++n) keys[n] += WIDTH;
            }
        }
        for (int64_t head = 0; head < group * kv_heads; ++head)
            finish(states[head], queries.sinks == nullptr ? nullptr : queries.sinks + head,
                   queries.result(token) + head * WIDTH);
    }
}

}  // namespace
