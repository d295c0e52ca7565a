// The online softmax of queries in the lanes of vectors: nothing is summed across lanes.

#pragma once

#include "attention_few.h"
#include "values.h"

namespace {

// Of LANES queries. Scores are those of consecutive tokens of the context, `stride` vectors apart.
struct LaneSoftmax {
    Integers first, last;  // what each query sees of its context
    Vector top, total;     // `top` is multiplied by the factor that `raise` gets

    // Numbers of queries go through the heads of a token, then the tokens; lanes left over have the last one.
    template <typename T> void begin(const Queries<T>& queries, int64_t from) {
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t token = smaller(from + lane, queries.count * queries.group - 1) / queries.group;
            first[lane] = int32_t(queries.first(token));
            last[lane] = int32_t(queries.last(token));
        }
        top = in_all_lanes(LEAST_SCORE);
        total = Vector{};
    }

    // Neither bound falls from one lane to the next.
    int64_t least() const { return first[0]; }
    int64_t most() const { return last[LANES - 1]; }

    // Scores of tokens that a query does not see become LEAST_SCORE.
    void hide(Vector* scores, int stride, int64_t start, int count) const {
        if (start >= first[LANES - 1] && start + count - 1 <= last[0]) return;
        Integers token = int32_t(start) - Integers{};
        for (int key = 0; key < count; ++key, token += 1) {
            Vector& own = scores[key * stride];
            own = ((token >= first) & (token <= last)) ? own : in_all_lanes(LEAST_SCORE);
        }
    }

    // Takes in scores whose weights are the powers of two of `factor` times them. The result is what earlier
    // sums are to be multiplied by.
    Vector raise(const Vector* scores, int stride, int count, float factor) {
        constexpr int CHAINS = 4;  // do not wait for one another
        Vector best[CHAINS];
        for (Vector& each : best) each = in_all_lanes(LEAST_SCORE);
        int key = 0;
        for (; key + CHAINS <= count; key += CHAINS)
            for (int i = 0; i < CHAINS; ++i) best[i] = larger(scores[(key + i) * stride], best[i]);
        for (; key < count; ++key) best[0] = larger(scores[key * stride], best[0]);
        const Vector all = larger(larger(best[0], best[1]), larger(best[2], best[3]));
        const Vector risen = larger(all * factor, top);
        const Vector rescale = power_of_two(top - risen);
        total *= rescale;
        top = risen;
        return rescale;
    }

    // The weight of one of the scores taken in, which is still to be added to `total`.
    Vector weight(Vector score, float factor) const { return power_of_two(score * factor - top); }

    // What sums are to be multiplied by, to be results.
    template <typename T> Vector finish(const Queries<T>& queries, int64_t from) const {
        if (queries.sinks == nullptr) return 1.0f / total;
        Vector sinks;
        for (int lane = 0; lane < LANES; ++lane)
            sinks[lane] = LOG2_E * number(queries.sinks[(from + lane) % queries.group]);
        const Vector risen = larger(sinks, top), rescale = power_of_two(top - risen);
        return rescale / (total * rescale + power_of_two(sinks - risen));
    }
};

}  // namespace
