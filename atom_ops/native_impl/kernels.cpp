// Kernels for CPUs, of float32 or bfloat16 values; sums are float32. The Python files beside this one
// say which ops they are, and check what is assumed here.
//
// Compiled for the instructions of the host: see build.py. Loops over features are what the compiler
// vectorizes; OpenMP threads share rows.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void put(float& to, float x) { to = x; }

// Rounds to the nearest, half to even; a NaN stays one.
inline void put(BFloat16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to.bits = uint16_t(x == x ? rounded : 0x7FC0);
}

// e to the power of x, to 1e-7 of its value; x is clamped to what float32 holds.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return (p * r * r + r + 1.0f) * power;
}

// Factor of a row in its RMS norm.
template <typename T> inline float norm_factor(const T* x, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += number(x[i]) * number(x[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

constexpr int64_t WORTH_THREADS = 16384;  // values, fewer are faster in one thread

template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t rows, int64_t size,
              float eps) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* own = x + row * size;
        if (residual != nullptr) {
            T* sum = total + row * size;
            for (int64_t i = 0; i < size; ++i) put(sum[i], number(own[i]) + number(residual[row * size + i]));
            own = sum;
        }
        const float factor = norm_factor(own, size, eps);
        for (int64_t i = 0; i < size; ++i)
            put(out[row * size + i], number(own[i]) * factor * number(weight[i]));
    }
}

template <typename T> void silu_and_mul(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T *gate = x + row * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; ++i) {
            const float g = number(gate[i]);
            T activated;
            put(activated, g / (1.0f + exponential(-g)));
            put(out[row * size + i], number(activated) * number(up[i]));
        }
    }
}

constexpr int64_t MOST_FEATURES = 256;  // of a head

// One head: its norm, if `weight` is given, then RoPE on the first `turned` features.
template <typename T>
inline void turn_head(const T* x, const T* weight, const float* cos, const float* sin, T* out, int64_t width,
                      int64_t turned, float eps) {
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
    const int64_t half = turned / 2;
    for (int64_t i = 0; i < half; ++i) put(out[i], head[i] * cos[i] + head[i + half] * sin[i]);
    for (int64_t i = half; i < turned; ++i) put(out[i], head[i] * cos[i] + head[i - half] * sin[i]);
    for (int64_t i = turned; i < width; ++i) put(out[i], head[i]);
}

// A token's slot in `kv` holds its key heads, then its value heads.
template <typename T>
void rotate_and_write(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                      int64_t cos_stride, int64_t sin_stride, T* q, T* kv, const int64_t* slots,
                      const T* q_weight, const T* k_weight, int64_t tokens, int64_t heads,
                      int64_t kv_heads, int64_t width, int64_t turned, float eps) {
#pragma omp parallel for if (tokens * (heads + 2 * kv_heads) * width > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token) {
        const T* x = qkv + token * qkv_stride;
        const float *token_cos = cos + token * cos_stride, *token_sin = sin + token * sin_stride;
        T* queries = q + token * heads * width;
        for (int64_t head = 0; head < heads; ++head, x += width)
            turn_head(x, q_weight, token_cos, token_sin, queries + head * width, width, turned, eps);
        if (slots[token] < 0) continue;  // padding
        T* keys = kv + slots[token] * 2 * kv_heads * width;
        for (int64_t head = 0; head < kv_heads; ++head, x += width)
            turn_head(x, k_weight, token_cos, token_sin, keys + head * width, width, turned, eps);
        std::memcpy(keys + kv_heads * width, x, kv_heads * width * sizeof(T));
    }
}

// Where the tokens of a context are: one layer's cache, and the row of the block table.
template <typename T> struct Context {
    const T* kv;  // of the key/value head
    const int32_t* table;
    int64_t block_size, token_stride, value_offset;

    const T* key(int64_t token) const {
        return kv + (table[token / block_size] * block_size + token % block_size) * token_stride;
    }
};

// 16 numbers; compilers make them of what registers a CPU has.
typedef float Vector __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
constexpr int LANES = 16;

inline Vector vector_at(const float* x) {
    Vector result;
    std::memcpy(&result, x, sizeof result);
    return result;
}

inline Vector vector_at(const BFloat16* x) {
    typedef uint16_t Bits __attribute__((vector_size(32)));
    typedef uint32_t Wide __attribute__((vector_size(64)));
    Bits bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Vector)(__builtin_convertvector(bits, Wide) << 16);
}

inline float sum_of(Vector x) {
    Half low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    low += high;
    Quarter one, other;
    std::memcpy(&one, &low, sizeof one);
    std::memcpy(&other, (const char*)&low + sizeof one, sizeof other);
    one += other;
    return (one[0] + one[2]) + (one[1] + one[3]);
}

constexpr int CHUNK = 64;   // tokens of one iteration of the online softmax
constexpr int QUERIES = 4;  // query heads that read keys and values together
constexpr int VALUES = 4;   // vectors of a value's features that are summed in registers

// The online softmax of one query: weights of a chunk's scores, and the factor of earlier sums.
struct Softmax {
    float top = -1.0e30f, total = 0.0f;

    float add(float* scores, int count) {
        float new_top = top;
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

// COUNT query heads of one token over tokens first ... last of its context; WIDTH features of a head.
template <typename T, int WIDTH, int COUNT>
void attend(const T* q, const Context<T>& context, int64_t first, int64_t last, float scale, const T* sinks,
            T* out) {
    constexpr int PARTS = WIDTH / LANES;
    Vector query[COUNT][PARTS], sum[COUNT][PARTS] = {};
    Softmax softmax[COUNT];
    float scores[COUNT][CHUNK];
    const T* keys[CHUNK];
    for (int n = 0; n < COUNT; ++n)
        for (int i = 0; i < PARTS; ++i) query[n][i] = vector_at(q + n * WIDTH + i * LANES) * scale;
    for (int64_t start = first; start <= last; start += CHUNK) {
        const int count = int(last - start + 1 < CHUNK ? last - start + 1 : CHUNK);
        for (int token = 0; token < count; ++token) {
            keys[token] = context.key(start + token);
            Vector products[COUNT] = {};
            for (int i = 0; i < PARTS; ++i) {
                const Vector key = vector_at(keys[token] + i * LANES);
                for (int n = 0; n < COUNT; ++n) products[n] += query[n][i] * key;
            }
            for (int n = 0; n < COUNT; ++n) scores[n][token] = sum_of(products[n]);
        }
        for (int n = 0; n < COUNT; ++n) {
            const float rescale = softmax[n].add(scores[n], count);
            for (int i = 0; i < PARTS; ++i) sum[n][i] *= rescale;
        }
        for (int from = 0; from < PARTS; from += VALUES) {
            const int parts = PARTS - from < VALUES ? PARTS - from : VALUES;
            Vector added[COUNT][VALUES] = {};
            for (int token = 0; token < count; ++token) {
                const T* value = keys[token] + context.value_offset + from * LANES;
                for (int i = 0; i < parts; ++i) {
                    const Vector part = vector_at(value + i * LANES);
                    for (int n = 0; n < COUNT; ++n) added[n][i] += scores[n][token] * part;
                }
            }
            for (int n = 0; n < COUNT; ++n)
                for (int i = 0; i < parts; ++i) sum[n][from + i] += added[n][i];
        }
    }
    for (int n = 0; n < COUNT; ++n) {
        float rescale = 1.0f;
        if (sinks != nullptr) {
            float sink = number(sinks[n]);
            rescale = softmax[n].add(&sink, 1);
        }
        const float factor = softmax[n].total > 0.0f ? rescale / softmax[n].total : 0.0f;
        for (int i = 0; i < PARTS; ++i) {
            const Vector part = sum[n][i] * factor;
            for (int lane = 0; lane < LANES; ++lane) put(out[n * WIDTH + i * LANES + lane], part[lane]);
        }
    }
}

// The query heads of one key/value head.
template <typename T, int WIDTH>
void attend_group(const T* q, const Context<T>& context, int64_t first, int64_t last, float scale,
                  const T* sinks, T* out, int64_t count) {
    while (count > 0) {
        const int64_t taken = count < QUERIES ? count : QUERIES;
        switch (taken) {
            case 1: attend<T, WIDTH, 1>(q, context, first, last, scale, sinks, out); break;
            case 2: attend<T, WIDTH, 2>(q, context, first, last, scale, sinks, out); break;
            case 3: attend<T, WIDTH, 3>(q, context, first, last, scale, sinks, out); break;
            default: attend<T, WIDTH, QUERIES>(q, context, first, last, scale, sinks, out);
        }
        q += taken * WIDTH, out += taken * WIDTH, count -= taken;
        sinks = sinks == nullptr ? nullptr : sinks + taken;
    }
}

template <typename T, int WIDTH>
void attend_rows(const T* q, int64_t q_stride, const T* kv, const int32_t* table, int64_t table_stride,
                 const int32_t* contexts, const int32_t* starts, const T* sinks, T* out, int64_t rows,
                 int64_t heads, int64_t kv_heads, int64_t block_size, int64_t window, float scale) {
    const int64_t group = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
            const Context<T> context{kv + kv_head * WIDTH, table + row * table_stride, block_size,
                                     2 * kv_heads * WIDTH, kv_heads * WIDTH};
            const int64_t head = kv_head * group;
            for (int64_t token = starts[row]; token < starts[row + 1]; ++token) {
                const int64_t last = contexts[row] - (starts[row + 1] - token);
                const int64_t first = window > 0 && last >= window ? last - window + 1 : 0;
                attend_group<T, WIDTH>(q + token * q_stride + head * WIDTH, context, first, last, scale,
                                       sinks == nullptr ? nullptr : sinks + head,
                                       out + (token * heads + head) * WIDTH, group);
            }
        }
    }
}

}  // namespace

// Each function for both types of values: `name_float32` and `name_bfloat16`.
#define FOR_BOTH(name, parameters, call)                                                                   \
    extern "C" void name##_float32 parameters {                                                            \
        using T = float;                                                                                   \
        call;                                                                                              \
    }                                                                                                      \
    extern "C" void name##_bfloat16 parameters {                                                           \
        using T = BFloat16;                                                                                \
        call;                                                                                              \
    }

FOR_BOTH(atom_rms_norm,
         (const void* x, const void* residual, const void* weight, void* out, void* total, int64_t rows,
          int64_t size, float eps),
         (rms_norm((const T*)x, (const T*)residual, (const T*)weight, (T*)out, (T*)total, rows, size, eps)))

FOR_BOTH(atom_silu_and_mul, (const void* x, void* out, int64_t rows, int64_t size),
         (silu_and_mul((const T*)x, (T*)out, rows, size)))

FOR_BOTH(atom_rotate_and_write,
         (const void* qkv, int64_t qkv_stride, const float* cos, const float* sin, int64_t cos_stride,
          int64_t sin_stride, void* q, void* kv, const int64_t* slots, const void* q_weight,
          const void* k_weight, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width,
          int64_t turned, float eps),
         (rotate_and_write((const T*)qkv, qkv_stride, cos, sin, cos_stride, sin_stride, (T*)q, (T*)kv, slots,
                           (const T*)q_weight, (const T*)k_weight, tokens, heads, kv_heads, width, turned,
                           eps)))

#define ATTEND(WIDTH)                                                                                      \
    case WIDTH:                                                                                            \
        return attend_rows<T, WIDTH>((const T*)q, q_stride, (const T*)kv, table, table_stride, contexts,   \
                                     starts, (const T*)sinks, (T*)out, rows, heads, kv_heads, block_size,  \
                                     window, scale);

FOR_BOTH(atom_attend,
         (const void* q, int64_t q_stride, const void* kv, const int32_t* table, int64_t table_stride,
          const int32_t* contexts, const int32_t* starts, const void* sinks, void* out, int64_t rows,
          int64_t heads, int64_t kv_heads, int64_t width, int64_t block_size, int64_t window, float scale),
         switch (width) { ATTEND(16) ATTEND(64) ATTEND(80) ATTEND(128) ATTEND(256) })
