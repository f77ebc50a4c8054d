// y = x * wᵀ in float32, as a compiled function for a CPU has it: Inductor puts this text before
// its first product. LibTorch's own products copy all of w at each call, which a prompt of some
// tens of tokens does not repay.
//
// x is copied, so that rows of x are the lanes of a vector: each number of w then meets a vector of
// rows. w is read once, in order. w of 8 or 4 bits is widened some rows at a time, in the cache.
// Few rows would leave most lanes empty and would not repay widening: then parts of a row of w,
// widened in registers, meet the same parts of each row of x. The memory of w is then the bound.
//
// x [rows, depth], w [outs, depth], y [rows, outs], all contiguous, none overlapping. Any sizes
// above 0.
// Throws std::bad_alloc, for the copies.
#ifndef BULKHEAD_PRODUCT_KERNEL_H
#define BULKHEAD_PRODUCT_KERNEL_H

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace bulkhead_product {
namespace {

constexpr int64_t floats_of_line = 16;
struct alignas(64) CacheLine {
    float values[floats_of_line];
};

using Vector = at::vec::Vectorized<float>;
using Integers = at::vec::Vectorized<int32_t>;
constexpr int64_t lanes = Vector::size();
constexpr int vectors_most = 3;
constexpr int64_t panel_rows = vectors_most * lanes;
// Rows of w that meet a panel of so many vectors at once: their sums, the panel's vectors and one
// of w fit the registers, 32 with AVX-512, else 16; and they are at least 8 sums, as many as two
// units of four cycles each can add to.
template <int Vectors>
constexpr int outs_at_once = lanes == 16 || Vectors == 1 ? 8 : 12 / Vectors;
constexpr int64_t tile_outs = lanes == 16 ? 16 : 24;  // whole vectors of y for each row
static_assert(tile_outs % outs_at_once<1> == 0 && tile_outs % outs_at_once<2> == 0 &&
              tile_outs % outs_at_once<vectors_most> == 0 && tile_outs % lanes == 0);
constexpr int64_t columns_at_once = 64;  // of x, copied by one thread
constexpr int64_t span = 32;             // of a row of w, widened at once
constexpr int span_vectors = span / lanes;
constexpr int64_t half_span = span / 2;
static_assert(half_span % lanes == 0);
// With two rows of w. Those of x then stay in the first cache up to a depth of 2,000.
constexpr int block_rows = 6;

// GCC 12 keeps the sums in memory unless these functions are inlined.
#define BULKHEAD_INLINE __attribute__((always_inline)) inline

BULKHEAD_INLINE float sum_of(Vector of) {
    return at::vec::vec_reduce_all<float>([](Vector one, Vector other) { return one + other; }, of);
}

// Asks for what lies behind the part of w that is read. Without it, 4 rows take 1.4 times as long.
BULKHEAD_INLINE void ask_ahead(const void* read, int64_t bytes) {
    constexpr int64_t bytes_ahead = 4096;
    for (int64_t at = 0; at < bytes; at += sizeof(CacheLine))
        __builtin_prefetch(static_cast<const char*>(read) + bytes_ahead + at);
}

struct Float32 {
    const float* values;  // [outs, depth]

    static constexpr bool narrow = false;
    static constexpr int64_t few_rows = block_rows;  // more are as fast in lanes
    const float* row(int64_t out, int64_t depth) const { return values + out * depth; }
    BULKHEAD_INLINE void widen(int64_t out, int64_t depth, int64_t at, Vector (&to)[span_vectors]) const {
        const float* const from = values + out * depth + at;
        ask_ahead(from, span * sizeof(float));
        for (int i = 0; i < span_vectors; ++i) to[i] = Vector::loadu(from + i * lanes);
    }
    float one(int64_t out, int64_t depth, int64_t at) const { return values[out * depth + at]; }
};

// As quantised.Int8Linear has them.
struct Int8 {
    const int8_t* values;  // [outs, depth]
    const float* scale;    // [outs]

    static constexpr bool narrow = true;
    static constexpr int64_t few_rows = 24;
    BULKHEAD_INLINE void widen(int64_t out, int64_t depth, int64_t at, Vector (&to)[span_vectors]) const {
        const int8_t* const from = values + out * depth + at;
        ask_ahead(from, span);
        for (int i = 0; i < span_vectors; ++i)
            to[i] = at::vec::convert<float>(at::vec::convert_to_int32<int8_t>(from + i * lanes)) * Vector(scale[out]);
    }
    float one(int64_t out, int64_t depth, int64_t at) const { return values[out * depth + at] * scale[out]; }
};

// As products.packed: of a group, which is a span, the low halves of its bytes come first.
struct Int4 {
    const uint8_t* values;  // [outs, depth / 2]
    const float* scale;     // [outs, depth / span]
    const float* least;     // [outs, depth / span]

    static constexpr bool narrow = true;
    static constexpr int64_t few_rows = 24;
    static constexpr int half = span_vectors / 2;
    BULKHEAD_INLINE void widen(int64_t out, int64_t depth, int64_t at, Vector (&to)[span_vectors]) const {
        const int64_t number = (out * depth + at) / span;
        const uint8_t* const from = values + number * half_span;
        ask_ahead(from, half_span);
        const Vector low_scale(scale[number]);
        const Vector high_scale(scale[number] / 16);  // of a byte whose low half is taken off
        const Vector base(least[number]);
        for (int i = 0; i < half; ++i) {
            const Integers bytes = at::vec::convert_to_int32<uint8_t>(from + i * lanes);
            const Vector low = at::vec::convert<float>(bytes & Integers(15));
            const Vector high = at::vec::convert<float>(bytes) - low;
            to[i] = at::vec::fmadd(low, low_scale, base);
            to[half + i] = at::vec::fmadd(high, high_scale, base);
        }
    }
    static float one(int64_t, int64_t, int64_t) { return 0; }  // depth is whole spans
};

// Row `out` of w, to `to` [depth].
template <typename Weights>
BULKHEAD_INLINE void widen(const Weights& weights, int64_t out, int64_t depth, float* to) {
    int64_t at = 0;
    for (; at + span <= depth; at += span) {
        Vector wide[span_vectors];
        weights.widen(out, depth, at, wide);
        for (int i = 0; i < span_vectors; ++i) wide[i].store(to + at + i * lanes);
    }
    for (; at < depth; ++at) to[at] = weights.one(out, depth, at);
}

// to [columns, rows] from `from` [rows, columns]; strides of rows are given.
BULKHEAD_INLINE void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                               int64_t columns) {
    int64_t row = 0;
    for (; row + lanes <= rows; row += lanes) {
        int64_t column = 0;
        for (; column + lanes <= columns; column += lanes)
            at::vec::transpose_mxn<float>(from + row * from_stride + column, from_stride, to + column * to_stride + row,
                                          to_stride, lanes, lanes);
        for (; column < columns; ++column)
            for (int64_t lane = 0; lane < lanes; ++lane)
                to[column * to_stride + row + lane] = from[(row + lane) * from_stride + column];
    }
    for (; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column)
            to[column * to_stride + row] = from[row * from_stride + column];
}

// Rows of x, transposed: [depth, vectors * lanes], missing rows filled with zeros.
struct Panel {
    float* values;
    int64_t rows;
    int vectors;

    static int64_t width_of(int64_t rows) { return (rows + lanes - 1) / lanes * lanes; }

    Panel(float* panels, int64_t number, int64_t all_rows, int64_t depth)
        : values{panels + number * panel_rows * depth}, rows{std::min(panel_rows, all_rows - number * panel_rows)},
          vectors{static_cast<int>(width_of(rows) / lanes)} {}

    // Columns `first` to `last` of x, which begins with the first row of the panel.
    BULKHEAD_INLINE void fill(const float* x, int64_t depth, int64_t first, int64_t last) const {
        const int64_t width = vectors * lanes;
        transpose(x + first, depth, values + first * width, width, rows, last - first);
        for (int64_t column = first; column < last; ++column)
            std::fill(values + column * width + rows, values + (column + 1) * width, 0.f);
    }
};

// Outs rows of w with all of a panel, to tile [Outs, panel_rows]. Asks for the rows of w that come
// next.
template <int Outs, int Vectors>
BULKHEAD_INLINE void multiply(const float* w, const float* panel, float* tile, int64_t depth) {
    Vector sums[Outs][Vectors];
    for (auto& out : sums)
        for (Vector& one : out) one = Vector(0.f);
    const auto add = [&](int64_t at) __attribute__((always_inline)) {
        Vector values[Vectors];
        for (int i = 0; i < Vectors; ++i) values[i] = Vector::loadu(panel + (at * Vectors + i) * lanes);
        for (int out = 0; out < Outs; ++out) {
            const Vector weight(w[out * depth + at]);
            for (int i = 0; i < Vectors; ++i) sums[out][i] = at::vec::fmadd(weight, values[i], sums[out][i]);
        }
    };
    int64_t at = 0;
    for (; at + floats_of_line <= depth; at += floats_of_line) {
        for (int out = 0; out < Outs; ++out) __builtin_prefetch(w + (Outs + out) * depth + at);
        for (int64_t i = 0; i < floats_of_line; ++i) add(at + i);
    }
    for (; at < depth; ++at) add(at);
    for (int out = 0; out < Outs; ++out)
        for (int i = 0; i < Vectors; ++i) sums[out][i].store(tile + out * panel_rows + i * lanes);
}

// `count` rows of w with all of a panel of Vectors vectors, to tile [count, panel_rows].
template <int Vectors>
BULKHEAD_INLINE void multiply_tile(const float* w, const float* panel, float* tile, int64_t count, int64_t depth) {
    constexpr int outs = outs_at_once<Vectors>;
    int64_t out = 0;
    for (; out + outs <= count; out += outs)
        multiply<outs, Vectors>(w + out * depth, panel, tile + out * panel_rows, depth);
    for (; out < count; ++out) multiply<1, Vectors>(w + out * depth, panel, tile + out * panel_rows, depth);
}

// Uninitialised cache lines for this number of floats.
std::unique_ptr<CacheLine[]> lines_of(int64_t floats) {
    return std::unique_ptr<CacheLine[]>{new CacheLine[(floats + floats_of_line - 1) / floats_of_line]};
}

// The last part of a row of w, from `at` on, which fills no span; zeros behind it.
template <typename Weights>
BULKHEAD_INLINE void widen_rest(const Weights& weights, int64_t out, int64_t depth, int64_t at,
                                Vector (&to)[span_vectors]) {
    float rest[span] = {};
    for (int64_t i = 0; at + i < depth; ++i) rest[i] = weights.one(out, depth, at + i);
    for (int i = 0; i < span_vectors; ++i) to[i] = Vector::loadu(rest + i * lanes);
}

// Outs rows of w with Rows of x, as `fill_block` copies them, to y [Rows, outs] from column `out`
// on.
template <int Rows, int Outs, typename Weights>
BULKHEAD_INLINE void multiply_few(const float* x, const Weights& weights, int64_t out, float* y, int64_t outs,
                                  int64_t depth) {
    Vector sums[Outs][Rows];
    for (auto& of_out : sums)
        for (Vector& one : of_out) one = Vector(0.f);
    Vector wide[Outs][span_vectors];
    const auto add = [&](const float* values_of_span) __attribute__((always_inline)) {
        for (int part = 0; part < span_vectors; ++part)
            for (int row = 0; row < Rows; ++row) {
                const Vector values = Vector::loadu(values_of_span + row * span + part * lanes);
                for (int i = 0; i < Outs; ++i) sums[i][row] = at::vec::fmadd(wide[i][part], values, sums[i][row]);
            }
    };
    int64_t at = 0;
    for (; at + span <= depth; at += span) {
        for (int i = 0; i < Outs; ++i) weights.widen(out + i, depth, at, wide[i]);
        add(x + at * Rows);
    }
    if (at < depth) {
        for (int i = 0; i < Outs; ++i) widen_rest(weights, out + i, depth, at, wide[i]);
        add(x + at * Rows);
    }
    for (int row = 0; row < Rows; ++row)
        for (int i = 0; i < Outs; ++i)
            y[row * outs + out + i] = sum_of(sums[i][row]);
}

// Rows `first` to `last` of w with `rows` rows of x, at most Rows.
template <int Rows, typename Weights>
void multiply_block(int64_t rows, const float* x, const Weights& weights, int64_t first, int64_t last, float* y,
                    int64_t outs, int64_t depth) {
    if constexpr (Rows > 1)
        if (rows < Rows) return multiply_block<Rows - 1>(rows, x, weights, first, last, y, outs, depth);
    for (; first + 2 <= last; first += 2) multiply_few<Rows, 2>(x, weights, first, y, outs, depth);
    if (first < last) multiply_few<Rows, 1>(x, weights, first, y, outs, depth);
}

// x [rows, depth] to [spans, rows, span], in the order in which it is read; zeros behind its last
// column.
BULKHEAD_INLINE void fill_block(const float* x, int64_t rows, int64_t depth, float* to) {
    for (int64_t at = 0; at < depth; at += span)
        for (int64_t row = 0; row < rows; ++row, to += span) {
            const int64_t count = std::min(span, depth - at);
            std::fill(std::copy_n(x + row * depth + at, count, to), to + span, 0.f);
        }
}

// Multiplications that one thread does as fast as it wakes another that spins: 128 by 128, 7 µs.
constexpr int64_t one_thread_most = 16384;

// `product` of few rows. Each thread copies x, which costs less than waiting for another's copy.
template <typename Weights>
void product_of_few(const float* x, const Weights& weights, float* y, int64_t rows, int64_t outs, int64_t depth) {
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    const int64_t whole = (depth + span - 1) / span * span;
    const auto copied = lines_of(omp_get_max_threads() * rows * whole);
#pragma omp parallel if (rows * outs * depth > one_thread_most)
    {
        float* const own = copied[0].values + omp_get_thread_num() * rows * whole;
        const auto begin = [&](int64_t block) { return rows * block / blocks; };
        for (int64_t block = 0; block < blocks; ++block)
            fill_block(x + begin(block) * depth, begin(block + 1) - begin(block), depth, own + begin(block) * whole);
#pragma omp for
        for (int64_t first = 0; first < outs; first += tile_outs)
            for (int64_t block = 0; block < blocks; ++block)
                multiply_block<block_rows>(begin(block + 1) - begin(block), own + begin(block) * whole, weights, first,
                                           std::min(first + tile_outs, outs), y + begin(block) * outs, outs, depth);
    }
}

// One row of w of 4 bits with one row of x. Multiplies sums of groups, not elements, with the
// group's scale and least value. A byte is its low half and 16 times its high half. So the byte
// meets a sixteenth of x's second half of a group; and its low half meets `low`, x's first half
// less that sixteenth.
float multiply_one(const Int4& weights, int64_t out, const float* low, const float* sixteenths, const float* sums_of_x,
                   int64_t groups) {
    const int64_t first = out * groups;
    Vector sum(0.f);
    for (int64_t group = 0; group < groups; ++group) {
        const uint8_t* const from = weights.values + (first + group) * half_span;
        ask_ahead(from, half_span);
        Vector products(0.f);
        for (int64_t at = 0; at < half_span; at += lanes) {
            const Integers bytes = at::vec::convert_to_int32<uint8_t>(from + at);
            const int64_t column = group * half_span + at;
            const Vector halves = at::vec::convert<float>(bytes & Integers(15));
            products = at::vec::fmadd(halves, Vector::loadu(low + column), products);
            products = at::vec::fmadd(at::vec::convert<float>(bytes), Vector::loadu(sixteenths + column), products);
        }
        sum = at::vec::fmadd(products, Vector(weights.scale[first + group]), sum);
    }
    const float* const least = weights.least + first;
    int64_t group = 0;
    for (; group + lanes <= groups; group += lanes)
        sum = at::vec::fmadd(Vector::loadu(least + group), Vector::loadu(sums_of_x + group), sum);
    float rest = 0;
    for (; group < groups; ++group) rest += least[group] * sums_of_x[group];
    return rest + sum_of(sum);
}

// `product` of one row.
void product_of_one(const float* x, const Int4& weights, float* y, int64_t outs, int64_t depth) {
    const int64_t groups = depth / span;
    const auto copied = lines_of(depth + groups);
    float* const low = copied[0].values;
    float* const sixteenths = low + depth / 2;
    float* const sums_of_x = low + depth;
    for (int64_t group = 0; group < groups; ++group, x += span) {
        Vector sum(0.f);
        for (int i = 0; i < span_vectors; ++i) sum = sum + Vector::loadu(x + i * lanes);
        sums_of_x[group] = sum_of(sum);
        for (int64_t at = 0; at < half_span; ++at) {
            sixteenths[group * half_span + at] = x[half_span + at] / 16;
            low[group * half_span + at] = x[at] - x[half_span + at] / 16;
        }
    }
#pragma omp parallel for if (outs * depth > one_thread_most)
    for (int64_t out = 0; out < outs; ++out) y[out] = multiply_one(weights, out, low, sixteenths, sums_of_x, groups);
}

template <typename Weights>
void product(const float* x, const Weights& weights, float* y, int64_t rows, int64_t outs, int64_t depth) {
    if constexpr (std::is_same_v<Weights, Int4>)
        if (rows == 1) return product_of_one(x, weights, y, outs, depth);
    if (rows <= Weights::few_rows) return product_of_few(x, weights, y, rows, outs, depth);
    const int64_t panels = (rows + panel_rows - 1) / panel_rows;
    const auto copied = lines_of(Panel::width_of(rows) * depth);
    const int64_t wide_floats = Weights::narrow ? tile_outs * depth : 0;
    const auto wide = lines_of(omp_get_max_threads() * wide_floats);
#pragma omp parallel
    {
#pragma omp for
        for (int64_t first = 0; first < depth; first += columns_at_once)
            for (int64_t number = 0; number < panels; ++number)
                Panel(copied[0].values, number, rows, depth)
                    .fill(x + number * panel_rows * depth, depth, first, std::min(first + columns_at_once, depth));
#pragma omp for
        for (int64_t first = 0; first < outs; first += tile_outs) {
            alignas(64) float tile[tile_outs * panel_rows];
            const int64_t count = std::min(tile_outs, outs - first);
            const float* w;
            if constexpr (Weights::narrow) {
                float* const own = wide[0].values + omp_get_thread_num() * wide_floats;
                for (int64_t out = 0; out < count; ++out) widen(weights, first + out, depth, own + out * depth);
                w = own;
            } else {
                w = weights.row(first, depth);
            }
            for (int64_t number = 0; number < panels; ++number) {
                const Panel panel(copied[0].values, number, rows, depth);
                if (panel.vectors == 1) multiply_tile<1>(w, panel.values, tile, count, depth);
                else if (panel.vectors == 2) multiply_tile<2>(w, panel.values, tile, count, depth);
                else multiply_tile<vectors_most>(w, panel.values, tile, count, depth);
                transpose(tile, panel_rows, y + number * panel_rows * outs + first, outs, count, panel.rows);
            }
        }
    }
}

}  // namespace
}  // namespace bulkhead_product

#endif  // BULKHEAD_PRODUCT_KERNEL_H
