// Attention of a row with many queries of bfloat16, by AMX: groups of 16 queries against chunks of 64 keys.
//
//                                 left side of a product     right side
//     scores [key][query]      =  keys   [key][pair]      *  queries [pair][query]     pairs of features
//     sums   [feature][query] +=  values [feature][pair]  *  weights [pair][query]     pairs of keys
//
// Each query is a lane of vectors, so that the softmax of scores sums nothing across lanes. A row of weights
// is two rows of scores, rounded and paired. Keys are copied as the cache has them; a group's queries are
// transposed once, and values once for all groups of a task. Rows and pairs are padded to whole tiles: keys,
// values and weights with zeros.
//
// A token's place in its chunk depends on its position alone: so the bits of a query's result depend neither
// on how a prompt is cut nor on the number of threads.

#pragma once

#include "attention_few.h"
#include "lane_softmax.h"
#include "tiles.h"

namespace {
constexpr int MOST_TILED_QUERIES = 256;  // of a task
}

#ifdef __AMX_BF16__

namespace {

constexpr int CHUNK_KEYS = 64;

constexpr int whole_tiles(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// Keys and values of a chunk: those of `start` ... `end - 1`.
template <int WIDTH> struct TiledChunk {
    static constexpr int PAIRS = whole_tiles(WIDTH / 2);  // of features
    alignas(64) uint32_t keys[CHUNK_KEYS][PAIRS];
    alignas(64) uint32_t values[WIDTH][CHUNK_KEYS / 2];
    int64_t start, end;

    // The tokens `first` ... `last` that are in the chunk of `first`; those before `first` are not read.
    void load(const Context<BFloat16>& context, int64_t first, int64_t last) {
        static constexpr BFloat16 ZEROS[WIDTH] = {};
        start = first / CHUNK_KEYS * CHUNK_KEYS;
        end = smaller(last + 1 - start, CHUNK_KEYS) + start;
        const int skipped = int(first - start), count = int(end - start);
        const BFloat16* places[CHUNK_KEYS];
        context.find(first, count - skipped, places + skipped);
        for (int key = 0; key < CHUNK_KEYS; ++key) {
            const bool read = key >= skipped && key < count;
            std::memcpy(keys[key], read ? places[key] : ZEROS, sizeof ZEROS);
            std::memset(keys[key] + WIDTH / 2, 0, sizeof keys[key] - sizeof ZEROS);
            places[key] = read ? places[key] + context.value_offset : ZEROS;
        }
        for (int key = 0; key < count; key += 2 * TILE_ROWS) {
            for (int from = 0; from < WIDTH; from += TILE_ROWS) {
                Vector rows[TILE_ROWS];
                for (int i = 0; i < TILE_ROWS; ++i)
                    rows[i] = pairs_at(places[key + 2 * i] + from, places[key + 2 * i + 1] + from);
                transpose(rows);
                for (int i = 0; i < TILE_ROWS; ++i)
                    std::memcpy(&values[from + i][key / 2], &rows[i], sizeof rows[i]);
            }
        }
    }

    // The number of tokens up to the last one that a query of the group sees.
    int count_for(const LaneSoftmax& softmax) const {
        return softmax.least() >= end ? 0 : smaller(softmax.most() + 1, end) - start;
    }
};

// 16 queries of a key/value head, and what they have seen of their context.
template <int WIDTH> struct QueryGroup {
    static constexpr int PAIRS = TiledChunk<WIDTH>::PAIRS;
    Vector pairs[PAIRS];  // of features: the queries
    Vector sums[WIDTH];   // of values, times their weights
    LaneSoftmax softmax;

    // Those from number `from` on; lanes left over have the last one again.
    void begin(const Queries<BFloat16>& queries, int64_t from) {
        softmax.begin(queries, from);
        std::memset(sums, 0, sizeof sums);
        for (int part = 0; part < PAIRS; part += TILE_ROWS) {
            Vector rows[TILE_ROWS] = {};
            const size_t bytes = smaller(WIDTH / 2 - part, TILE_ROWS) * sizeof(uint32_t);
            for (int lane = 0; lane < LANES; ++lane)
                std::memcpy(&rows[lane], queries.in(from + lane, WIDTH) + 2 * part, bytes);
            transpose(rows);
            std::memcpy(pairs + part, rows, sizeof rows);
        }
    }

    // Adds the first `count` tokens of a chunk.
    void attend(const TiledChunk<WIDTH>& chunk, int count, Scores rule) {
        Vector scores[CHUNK_KEYS], weights[CHUNK_KEYS / 2];
        multiply_tiles<false>(chunk.keys[0], PAIRS, pairs, PAIRS, scores, whole_tiles(count));
        const float factor = rule.base_two((float*)scores, count * LANES);
        softmax.hide(scores, 1, chunk.start, count);
        const Vector rescale = softmax.raise(scores, 1, count, factor), unchanged = in_all_lanes(1.0f);
        if (std::memcmp(&rescale, &unchanged, sizeof rescale) != 0)
            for (Vector& sum : sums) sum *= rescale;
        Vector added = {};
        for (int key = 0; key < count; key += 2) {
            const Vector weight = softmax.weight(scores[key], factor);
            const Vector next = key + 1 < count ? softmax.weight(scores[key + 1], factor) : Vector{};
            weights[key / 2] = pairs_of(weight, next);
            added += weight + next;
        }
        softmax.total += added;
        const int used = (count + 1) / 2, padded = whole_tiles(used);  // pairs of keys
        std::memset(weights + used, 0, (padded - used) * sizeof weights[0]);
        multiply_tiles<true>(chunk.values[0], CHUNK_KEYS / 2, weights, padded, sums, WIDTH);
    }

    // Writes the results.
    void finish(const Queries<BFloat16>& queries, int64_t from) {
        const Vector factor = softmax.finish(queries, from);
        const int filled = smaller(queries.count * queries.group - from, LANES);
        for (int part = 0; part < WIDTH; part += LANES) {
            Vector* rows = sums + part;
            for (int i = 0; i < LANES; ++i) rows[i] *= factor;
            transpose(rows);
            for (int lane = 0; lane < filled; ++lane)
                put(queries.result(from + lane, WIDTH) + part, rows[lane]);
        }
    }
};

// `count` queries of a key/value head, number `from` and those after it.
template <int WIDTH>
void attend_by_tiles(const Queries<BFloat16>& queries, const Context<BFloat16>& context, Scores rule,
                     int64_t from, int64_t count) {
    QueryGroup<WIDTH> groups[MOST_TILED_QUERIES / LANES];
    TiledChunk<WIDTH> chunk;
    const int used = int((count + LANES - 1) / LANES);
    for (int i = 0; i < used; ++i) groups[i].begin(queries, from + i * LANES);
    configure_tiles(TILE_ROWS, TILE_ROWS);
    const int64_t last = groups[used - 1].softmax.most();
    for (int64_t first = groups[0].softmax.least(); first <= last; first = chunk.end) {
        chunk.load(context, first, last);
        for (int i = 0; i < used; ++i) {
            const int seen = chunk.count_for(groups[i].softmax);
            if (seen > 0) groups[i].attend(chunk, seen, rule);
        }
    }
    _tile_release();
    for (int i = 0; i < used; ++i) groups[i].finish(queries, from + i * LANES);
}

}  // namespace

#endif
