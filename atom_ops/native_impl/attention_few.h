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

// Tokens of one iteration of the online softmax. Values are fetched while the keys of their chunk are read, and
// the next chunk's keys while the values are. With 16 or 64 tokens what is fetched comes too late or goes too early.
constexpr int CHUNK = 32;
constexpr int HEADS = 4;  // query heads that read keys and values together
constexpr int PARTIAL = LANES / 4;  // vectors of a value's features that are summed in registers
constexpr float LEAST_SCORE = -1.0e30f;

// Products of words: the left ones are broadcast, the right ones are in vectors. These are of one float32 value.
template <typename T> struct Products {
    typedef float Word;
    static constexpr int VALUES = 1;

    static Vector add(Vector sum, Word left, Vector right) { return sum + left * right; }

    static void load(const T* x, Word* words, int width) {
        for (int i = 0; i < width; ++i) words[i] = number(x[i]);
    }

    static void join(const T* x, const T*, Word* words, int width) { load(x, words, width); }

    static Vector joined(Vector one, Vector) { return one; }

    // A vector of right words: LANES values of one token, and of the next one.
    static Vector words_at(const T* x, const T*) { return vector_at(x); }

    // Left words of a vector's neighbours.
    static void put_words(Word* words, Vector x) { put(words, x); }
};

#ifdef __AVX512BF16__
// Words of two neighbours, or of values at the same place of two tokens.
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

    static Vector joined(Vector one, Vector next) { return pairs_of(one, next); }

    static Vector words_at(const BFloat16* x, const BFloat16* next) { return pairs_at(x, next); }

    static void put_words(Word* words, Vector x) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
        std::memcpy(words, &rounded, sizeof rounded);
    }
};
#endif

// The online softmax of one query. Each lane of `top` is the highest score so far, in base two; the lanes
// of `total` are still to be summed.
struct Softmax {
    Vector top = in_all_lanes(LEAST_SCORE), total = {};

    // Scores become weights, the powers of two of `factor` times them. The result is the factor of earlier sums.
    Vector add(Vector* scores, int vectors, float factor) {
        Vector best = scores[0];
        for (int i = 1; i < vectors; ++i) best = larger(scores[i], best);
        const Vector risen = larger(highest(best) * factor, top);
        const Vector rescale = power_of_two(top - risen);
        top = risen;
        total *= rescale;
        for (int i = 0; i < vectors; ++i) total += scores[i] = power_of_two(scores[i] * factor - risen);
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

        explicit Key(const BFloat16* key) {
            for (int i = 0; i < PARTS; ++i) parts[i] = pairs_at(key + i * 2 * LANES);
        }
    };

    void load(const BFloat16* q) {
        for (int i = 0; i < PARTS; ++i) parts[i] = pairs_at(q + i * 2 * LANES);
    }
    Vector times(const Key& key) const {
        Vector sum = {};
        for (int i = 0; i < PARTS; ++i) sum = add_pairs(sum, parts[i], key.parts[i]);
        return sum;
    }
};
#endif

// COUNT query heads of one key/value head over the keys and values of `count` tokens, rounded up to
// LANES; `keys` has CHUNK more, whose keys are fetched.
template <typename T, int WIDTH, int COUNT>
void attend(const T* q, const T* const* keys, int64_t value_offset, int count, Scores rule,
            HeadState<WIDTH>* states) {
    typedef Products<T> P;
    constexpr int PARTS = WIDTH / LANES, LINE = 64 / int(sizeof(T));
    typedef Query<T, WIDTH, WIDTH % (2 * LANES) == 0> HeadQuery;
    HeadQuery queries[COUNT];
    for (int n = 0; n < COUNT; ++n) queries[n].load(q + n * WIDTH);
    const int vectors = (count + LANES - 1) / LANES;
    Vector scores[COUNT][CHUNK / LANES];
    alignas(64) typename P::Word weights[COUNT][CHUNK / P::VALUES];
    // Products take turns with what is fetched, so that memory always has some to do.
    for (int v = 0; v < vectors; ++v) {
        Vector sums[COUNT][LANES];
        for (int token = 0; token < LANES; ++token) {
            const T* place = keys[v * LANES + token];
            for (int i = 0; i < WIDTH; i += LINE) __builtin_prefetch(place + value_offset + i);
            const typename HeadQuery::Key key(place);
            for (int n = 0; n < COUNT; ++n) sums[n][token] = queries[n].times(key);
        }
        for (int n = 0; n < COUNT; ++n) scores[n][v] = sums_of(sums[n]);
    }
    for (int n = 0; n < COUNT; ++n) {
        const float factor = rule.base_two((float*)scores[n], count);
        // Lanes after the last token have its key again, and no weight.
        for (int token = count; token < vectors * LANES; ++token) ((float*)scores[n])[token] = LEAST_SCORE;
        const Vector rescale = states[n].softmax.add(scores[n], vectors, factor);
        for (int v = 0; v < vectors; ++v) P::put_words(weights[n] + v * LANES / P::VALUES, scores[n][v]);
        for (int i = 0; i < PARTS; ++i) states[n].sum[i] *= rescale;
    }
    for (int from = 0; from < PARTS; from += PARTIAL) {
        const int parts = PARTS - from < PARTIAL ? PARTS - from : PARTIAL;
        Vector added[COUNT][PARTIAL] = {};
        for (int token = 0; token < count; token += P::VALUES) {
            const T* const* own = keys + token;
            if (from * LANES % LINE == 0)
                for (int value = 0; value < P::VALUES; ++value)
                    for (int i = 0; i < parts * LANES; i += LINE)
                        __builtin_prefetch(own[CHUNK + value] + from * LANES + i);
            for (int i = 0; i < parts; ++i) {
                const int64_t place = value_offset + (from + i) * LANES;
                const Vector words = P::words_at(own[0] + place, own[P::VALUES - 1] + place);
                for (int n = 0; n < COUNT; ++n)
                    added[n][i] = P::add(added[n][i], weights[n][token / P::VALUES], words);
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
    Softmax& softmax = state.softmax;
    Vector rescale = in_all_lanes(1.0f);
    if (sink != nullptr) {
        Vector score = in_all_lanes(LEAST_SCORE);
        score[0] = number(*sink);
        rescale = softmax.add(&score, 1, LOG2_E);
    }
    float total = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) total += softmax.total[lane];
    const Vector factor = total > 0.0f ? rescale / total : Vector{};
    for (int i = 0; i < WIDTH / LANES; ++i) put(out + i * LANES, state.sum[i] * factor);
}

// Each token with the query heads of `kv_heads` key/value heads. All of them take a chunk before the next
// one, so that memory is read in its order.
template <typename T, int WIDTH>
void attend_each(const Queries<T>& queries, const Context<T>& context, Scores rule, int64_t kv_heads) {
    const int64_t group = queries.group;
    const T* keys[2 * CHUNK];
    for (int64_t token = 0; token < queries.count; ++token) {
        std::vector<HeadState<WIDTH>> states(group * kv_heads);
        const int64_t last = queries.last(token);
        for (int64_t start = queries.first(token); start <= last; start += CHUNK) {
            const int count = smaller(last - start + 1, CHUNK);
            const int known = smaller(last - start + 1, 2 * CHUNK);
            const int filled = (count + LANES - 1) / LANES * LANES + CHUNK;
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
