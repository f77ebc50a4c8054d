// y = x * wᵀ in float32, as a compiled function for a CPU has it: Inductor puts this text before its first product.
// LibTorch's own products copy all of w at each call, which a prompt of some tens of tokens does not repay.
//
// x [rows, depth], w [outs, depth], y [rows, outs], all contiguous, none overlapping. Any sizes.
#ifndef BULKHEAD_PRODUCT_KERNEL_H
#define BULKHEAD_PRODUCT_KERNEL_H

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

namespace bulkhead_product {
namespace {

constexpr int64_t floats_of_line = 16;
struct alignas(64) CacheLine {
    float values[floats_of_line];
};

using Vector = at::vec::Vectorized<float>;
constexpr int64_t lanes = Vector::size();
constexpr int64_t panel_outs = 2 * lanes;  // two vectors of y for each row that is computed together
static_assert(panel_outs % floats_of_line == 0);
// Accumulators, the two vectors of a panel and one of x fit the registers: 32 with AVX-512, else 16.
constexpr int rows_at_once = lanes == 16 ? 12 : 6;
// From so many rows on it pays to transpose w, panel by panel (measured from 4 to 512 rows).
constexpr int64_t rows_many = 17;

// GCC 12 keeps the sums in memory unless these functions are inlined.
#define BULKHEAD_INLINE __attribute__((always_inline)) inline

// Dot products of Rows rows of x with Outs rows of w, each of which is read once and in order.
template <int Rows, int Outs>
BULKHEAD_INLINE void dots(const float* x, const float* w, float* y, int64_t depth, int64_t outs) {
    Vector sums[Rows][Outs];
    for (auto& row : sums)
        for (Vector& one : row) one = Vector(0.f);
    const auto add = [&](int64_t at, int64_t count) __attribute__((always_inline)) {
        Vector weights[Outs];
        for (int out = 0; out < Outs; ++out) weights[out] = Vector::loadu(w + out * depth + at, count);
        for (int row = 0; row < Rows; ++row) {
            const Vector values = Vector::loadu(x + row * depth + at, count);
            for (int out = 0; out < Outs; ++out) sums[row][out] = at::vec::fmadd(values, weights[out], sums[row][out]);
        }
    };
    int64_t at = 0;
    for (; at + lanes <= depth; at += lanes) add(at, lanes);
    if (at < depth) add(at, depth - at);
    for (int row = 0; row < Rows; ++row)
        for (int out = 0; out < Outs; ++out)
            y[row * outs + out] =
                at::vec::vec_reduce_all<float>([](Vector& a, Vector& b) { return a + b; }, sums[row][out]);
}

template <int Outs>
BULKHEAD_INLINE void dots(const float* x, const float* w, float* y, int64_t rows, int64_t depth, int64_t outs) {
    for (; rows >= 4; rows -= 4, x += 4 * depth, y += 4 * outs) dots<4, Outs>(x, w, y, depth, outs);
    if (rows == 3) dots<3, Outs>(x, w, y, depth, outs);
    if (rows == 2) dots<2, Outs>(x, w, y, depth, outs);
    if (rows == 1) dots<1, Outs>(x, w, y, depth, outs);
}

// Few rows: outs `first` to `last`.
BULKHEAD_INLINE void few(const float* x, const float* w, float* y, int64_t rows, int64_t depth, int64_t outs,
                         int64_t first, int64_t last) {
    int64_t out = first;
    for (; out + 4 <= last; out += 4) dots<4>(x, w + out * depth, y + out, rows, depth, outs);
    for (; out < last; ++out) dots<1>(x, w + out * depth, y + out, rows, depth, outs);
}

// panel [depth, panel_outs] from panel_outs rows of w.
BULKHEAD_INLINE void transpose(const float* w, float* panel, int64_t depth) {
    int64_t at = 0;
    for (; at + lanes <= depth; at += lanes)
        for (int64_t half = 0; half < panel_outs; half += lanes)
            at::vec::transpose_mxn<float>(w + half * depth + at, depth, panel + at * panel_outs + half, panel_outs,
                                          lanes, lanes);
    for (; at < depth; ++at)
        for (int64_t out = 0; out < panel_outs; ++out) panel[at * panel_outs + out] = w[out * depth + at];
}

// Rows rows of x with all of a panel.
template <int Rows>
BULKHEAD_INLINE void by_panel(const float* x, const float* panel, float* y, int64_t depth, int64_t outs) {
    Vector sums[Rows][2];
    for (auto& row : sums) row[0] = row[1] = Vector(0.f);
    for (int64_t at = 0; at < depth; ++at) {
        const Vector left = Vector::loadu(panel + at * panel_outs);
        const Vector right = Vector::loadu(panel + at * panel_outs + lanes);
        for (int row = 0; row < Rows; ++row) {
            const Vector value(x[row * depth + at]);
            sums[row][0] = at::vec::fmadd(value, left, sums[row][0]);
            sums[row][1] = at::vec::fmadd(value, right, sums[row][1]);
        }
    }
    for (int row = 0; row < Rows; ++row) {
        sums[row][0].store(y + row * outs);
        sums[row][1].store(y + row * outs + lanes);
    }
}

// `rows` of them, fewer than Rows.
template <int Rows>
BULKHEAD_INLINE void rest_by_panel(const float* x, const float* panel, float* y, int64_t rows, int64_t depth,
                                   int64_t outs) {
    if constexpr (Rows > 1) {
        if (rows == Rows - 1) return by_panel<Rows - 1>(x, panel, y, depth, outs);
        rest_by_panel<Rows - 1>(x, panel, y, rows, depth, outs);
    }
}

void product(const float* x, const float* w, float* y, int64_t rows, int64_t outs, int64_t depth) {
    const int64_t panels = (outs + panel_outs - 1) / panel_outs;
#pragma omp parallel
    {
        std::unique_ptr<CacheLine[]> lines;
        if (rows >= rows_many) lines.reset(new (std::nothrow) CacheLine[depth * panel_outs / floats_of_line]);
        float* const panel = reinterpret_cast<float*>(lines.get());
#pragma omp for
        for (int64_t number = 0; number < panels; ++number) {
            const int64_t first = number * panel_outs;
            const int64_t last = std::min(first + panel_outs, outs);
            if (panel == nullptr || last - first < panel_outs) {
                few(x, w, y, rows, depth, outs, first, last);
                continue;
            }
            transpose(w + first * depth, panel, depth);
            int64_t row = 0;
            for (; row + rows_at_once <= rows; row += rows_at_once)
                by_panel<rows_at_once>(x + row * depth, panel, y + row * outs + first, depth, outs);
            rest_by_panel<rows_at_once>(x + row * depth, panel, y + row * outs + first, rows - row, depth, outs);
        }
    }
}

}  // namespace
}  // namespace bulkhead_product

#endif  // BULKHEAD_PRODUCT_KERNEL_H
