// Values of a seeded matrix on a CPU, and products with them that keep only a few rows, in the first-level cache.
//
// The same bits as seeded/tensor.py, which explains streams and schemes. fused_cpu.py compiles this file with the instructions of
// the machine and calls the three functions at its end. Words of Philox lie in the lower halves of 64-bit lanes: a multiplication of
// lower halves gives both halves of the product at once, and what is left in the upper halves does no harm.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef uint64_t Lanes __attribute__((vector_size(LANES * 8), may_alias));
constexpr int VECTORS = 4;  // computed side by side, because each waits for its own products
constexpr int BATCH = LANES * VECTORS;  // calls

inline Lanes product(Lanes word, Lanes multiplier) {  // of the lower halves
#if defined(__AVX512F__)
    return (Lanes)_mm512_mul_epu32((__m512i)word, (__m512i)multiplier);
#elif defined(__AVX2__)
    return (Lanes)_mm256_mul_epu32((__m256i)word, (__m256i)multiplier);
#else
    return (word & 0xFFFFFFFFu) * multiplier;
#endif
}

struct Stream {
    uint32_t key[2], upper[2];
};

// The four words of the calls with these first and second counter words: call i is words[4 i .. 4 i + 3].
inline void philox(const Stream& stream, const Lanes* first, const Lanes* second, uint32_t* words) {
    const Lanes zero = {};
    const Lanes m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;
    Lanes c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        c0[v] = first[v];
        c1[v] = second[v];
        c2[v] = zero + stream.upper[0];
        c3[v] = zero + stream.upper[1];
    }
    uint32_t k0 = stream.key[0], k1 = stream.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const Lanes key0 = zero + k0, key1 = zero + k1;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Lanes p0 = product(c0[v], m0), p1 = product(c2[v], m1);
            c0[v] = (p1 >> 32) ^ c1[v] ^ key0;
            c2[v] = (p0 >> 32) ^ c3[v] ^ key1;
            c1[v] = p1;
            c3[v] = p0;
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        const Lanes low = (c0[v] & 0xFFFFFFFFu) | (c1[v] << 32), high = (c2[v] & 0xFFFFFFFFu) | (c3[v] << 32);
        Lanes* out = reinterpret_cast<Lanes*>(words) + 2 * v;
#if defined(__AVX512F__)
        const Lanes one = {0, 8, 1, 9, 2, 10, 3, 11}, two = {4, 12, 5, 13, 6, 14, 7, 15};
#else
        const Lanes one = {0, 4, 1, 5}, two = {2, 6, 3, 7};
#endif
        out[0] = __builtin_shuffle(low, high, one);
        out[1] = __builtin_shuffle(low, high, two);
    }
}

enum Kind { UNIFORM = 0, INT8 = 1, SIGN = 2 };

inline int values_of_call(int kind) { return kind == UNIFORM ? 4 : kind == INT8 ? 16 : 128; }

// The values of `calls` calls.
inline void unpack(int kind, const uint32_t* words, int calls, float scale, float* out) {
    if (kind == UNIFORM) {
        for (int i = 0; i < 4 * calls; i++)
            out[i] = ((float)(int32_t)(words[i] >> 8) + (0.5f - 8388608.0f)) * scale;
    } else if (kind == INT8) {
        const int8_t* octets = reinterpret_cast<const int8_t*>(words);
        for (int i = 0; i < 16 * calls; i++) out[i] = (float)(2 * (int32_t)octets[i] + 1) * scale;
    } else {
        uint32_t bits;
        std::memcpy(&bits, &scale, 4);
        for (int i = 0; i < 4 * calls; i++) {
            uint32_t signs[32];
            for (int j = 0; j < 32; j++) signs[j] = bits ^ ((words[i] >> j) << 31);
            std::memcpy(out + 32 * i, signs, sizeof signs);
        }
    }
}

struct Matrix {
    int kind;
    Stream stream;
    int64_t width;  // of a row of the whole matrix
    float scale;
};

// Values [begin, end) of the flat matrix, of 4 a call.
void fill_flat(const Matrix& m, int64_t begin, int64_t end, float* out) {
    alignas(64) uint32_t words[4 * BATCH];
    alignas(64) float values[4 * BATCH];
    Lanes lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t call = begin / 4; 4 * call < end; call += BATCH) {
        Lanes first[VECTORS], second[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            first[v] = lane + (uint64_t)(call + v * LANES);
            second[v] = first[v] >> 32;
        }
        philox(m.stream, first, second, words);
        const int64_t start = std::max(begin, 4 * call), stop = std::min(end, 4 * (call + BATCH));
        if (stop - start == 4 * BATCH) {
            unpack(UNIFORM, words, BATCH, m.scale, out + (start - begin));
        } else {
            unpack(UNIFORM, words, BATCH, m.scale, values);
            std::memcpy(out + (start - begin), values + (start - 4 * call), (stop - start) * sizeof(float));
        }
    }
}

// Columns [start, stop) of `count` rows whose calls begin anew in each row.
void fill_rows(const Matrix& m, const int64_t* rows, int64_t count, int64_t start, int64_t stop, float* out, int64_t stride) {
    alignas(64) uint32_t words[4 * BATCH];
    alignas(64) uint64_t first[BATCH], second[BATCH];
    alignas(64) float values[128];
    const int size = values_of_call(m.kind);
    const int64_t begin = start / size, end = (stop + size - 1) / size, per_row = end - begin, total = count * per_row;
    int64_t row = 0, call = begin, row_out = 0, call_out = begin;
    for (int64_t done = 0; done < total; done += BATCH) {
        const int number = (int)std::min<int64_t>(BATCH, total - done);
        for (int i = 0; i < BATCH; i++) {
            first[i] = call;
            second[i] = row < count ? rows[row] : 0;
            if (++call == end) call = begin, row++;
        }
        philox(m.stream, reinterpret_cast<const Lanes*>(first), reinterpret_cast<const Lanes*>(second), words);
        for (int i = 0; i < number;) {
            // All calls of a row that lie within the row are unpacked at once.
            const int64_t left = std::max(start, call_out * size), run = std::min<int64_t>(number - i, end - call_out);
            const int64_t whole = left == call_out * size ? std::min(run, (stop - left) / size) : 0;
            float* target = out + row_out * stride + (left - start);
            int64_t used = whole;
            if (whole > 0) {
                unpack(m.kind, words + 4 * i, (int)whole, m.scale, target);
            } else {
                unpack(m.kind, words + 4 * i, 1, m.scale, values);
                const int64_t right = std::min(stop, (call_out + 1) * size);
                std::memcpy(target, values + (left - call_out * size), (right - left) * sizeof(float));
                used = 1;
            }
            i += (int)used;
            call_out += used;
            if (call_out == end) call_out = begin, row_out++;
        }
    }
}

void fill(const Matrix& m, const int64_t* rows, int64_t count, int64_t start, int64_t stop, float* out, int64_t stride) {
    if (m.kind != UNIFORM) {
        fill_rows(m, rows, count, start, stop, out, stride);
        return;
    }
    for (int64_t i = 0; i < count;) {  // whole rows that follow one another are one piece
        int64_t next = i + 1;
        if (stop - start == m.width && stride == m.width)
            while (next < count && rows[next] == rows[next - 1] + 1) next++;
        fill_flat(m, rows[i] * m.width + start, rows[next - 1] * m.width + stop, out + i * stride);
        i = next;
    }
}

// y[r] = x · w[r], for four rows of `size` values each, so that four sums are on their way at a time.
inline void dot4(const float* x, const float* w, int64_t size, float* y) {
    const float *w0 = w, *w1 = w + size, *w2 = w + 2 * size, *w3 = w + 3 * size;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < size; i++) {
        s0 += x[i] * w0[i];
        s1 += x[i] * w1[i];
        s2 += x[i] * w2[i];
        s3 += x[i] * w3[i];
    }
    y[0] = s0, y[1] = s1, y[2] = s2, y[3] = s3;
}

inline float dot(const float* x, const float* w, int64_t size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += x[i] * w[i];
    return sum;
}

constexpr int64_t IN_CACHE = 8192;  // values: 32 KiB

}  // namespace

extern "C" {

// out (count, stop - start), rows `stride` apart.
void hf_freeze_fill(int kind, const uint32_t* stream, int64_t width, float scale, const int64_t* rows, int64_t count, int64_t start,
                    int64_t stop, float* out, int64_t stride) {
    const Matrix m = {kind, {{stream[0], stream[1]}, {stream[2], stream[3]}}, width, scale};
    fill(m, rows, count, start, stop, out, stride);
}

// y[t, r] = x[t] · row r (+ bias[r]) for the rows [begin, end); x (tokens, width), y and bias from output `begin` on.
void hf_freeze_multiply_rows(int kind, const uint32_t* stream, int64_t width, float scale, int64_t begin, int64_t end,
                             const float* x, int64_t tokens, const float* bias, float* y, int64_t y_stride) {
    const Matrix m = {kind, {{stream[0], stream[1]}, {stream[2], stream[3]}}, width, scale};
    const int64_t step = std::max<int64_t>(4, IN_CACHE / std::max<int64_t>(width, 1) / 4 * 4);
    std::vector<float> tile(step * width);
    std::vector<int64_t> rows(step);
    for (int64_t row = begin; row < end; row += step) {
        const int64_t count = std::min(step, end - row);
        for (int64_t i = 0; i < count; i++) rows[i] = row + i;
        fill(m, rows.data(), count, 0, width, tile.data(), width);
        for (int64_t t = 0; t < tokens; t++) {
            float* out = y + t * y_stride + (row - begin);
            int64_t i = 0;
            for (; i + 4 <= count; i += 4) dot4(x + t * width, tile.data() + i * width, width, out + i);
            for (; i < count; i++) out[i] = dot(x + t * width, tile.data() + i * width, width);
            if (bias != nullptr)
                for (i = 0; i < count; i++) out[i] += bias[row - begin + i];
        }
    }
}

// y[t] = sum over r of x[t, r] row r, columns [start, stop) (+ bias); x (tokens, height), y and bias from column `start` on.
void hf_freeze_multiply_columns(int kind, const uint32_t* stream, int64_t width, float scale, int64_t height, int64_t start,
                                int64_t stop, const float* x, int64_t tokens, const float* bias, float* y, int64_t y_stride) {
    const Matrix m = {kind, {{stream[0], stream[1]}, {stream[2], stream[3]}}, width, scale};
    const int64_t size = stop - start, step = std::max<int64_t>(4, IN_CACHE / std::max<int64_t>(size, 1));
    std::vector<float> tile(step * size);
    std::vector<int64_t> rows(step);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < size; i++) y[t * y_stride + i] = bias != nullptr ? bias[i] : 0.0f;
    for (int64_t row = 0; row < height; row += step) {
        const int64_t count = std::min(step, height - row);
        for (int64_t i = 0; i < count; i++) rows[i] = row + i;
        fill(m, rows.data(), count, start, stop, tile.data(), size);
        for (int64_t t = 0; t < tokens; t++) {
            float* out = y + t * y_stride;
            for (int64_t r = 0; r < count; r++) {
                const float factor = x[t * height + row + r];
                const float* values = tile.data() + r * size;
                for (int64_t i = 0; i < size; i++) out[i] += factor * values[i];
            }
        }
    }
}
}
