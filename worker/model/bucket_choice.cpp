#include "worker/model/bucket_choice.h"

#include <algorithm>

#include <fmt/ranges.h>

namespace bulkhead::worker {
namespace {

bool is_fixed(const config::DimRange& range) { return range.min == range.max; }

bool equals(const config::Bucket& bucket, std::span<const Shape> inputs) {
    return std::ranges::equal(bucket.shapes, inputs,
                              [](const auto& shape, Shape dims) { return std::ranges::equal(shape, dims); });
}

/// Whether the request has the bucket's ranks, and no dim exceeds the bucket's.
bool fits(const config::Bucket& bucket, std::span<const Shape> inputs) {
    return std::ranges::equal(bucket.shapes, inputs, [](const auto& shape, Shape dims) {
        return std::ranges::equal(shape, dims, [](std::int64_t room, std::int64_t size) {
            return size == room || (size > 0 && size < room);
        });
    });
}

bool may_be_padded(const config::MethodSpec& method, const config::Bucket& bucket, std::span<const Shape> inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i)
        if (!std::ranges::equal(bucket.shapes[i], inputs[i]) && !method.padding.contains(method.inputs[i].name))
            return false;
    return true;
}

/// Whether the declaration gives both dims one size: they have the same name or, without names,
/// the same range.
bool is_alike(const config::DimRange& a, const config::DimRange& b) {
    if (!a.name.empty() && !b.name.empty()) return a.name == b.name;
    return a.min == b.min && a.max == b.max;
}

/// The one size of all input dims like this one; empty if there are none, or several sizes.
std::optional<std::int64_t> size_of_range(const config::MethodSpec& method, const config::DimRange& range,
                                          std::span<const Shape> inputs) {
    std::optional<std::int64_t> size;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto& declared = method.inputs[i].shape;
        for (std::size_t d = 0; d < declared.size(); ++d) {
            if (!is_alike(declared[d], range)) continue;
            if (size && *size != inputs[i][d]) return std::nullopt;
            size = inputs[i][d];
        }
    }
    return size;
}

/// The dims of every output for these inputs; empty if a varying dim is ambiguous.
std::optional<std::vector<std::vector<std::int64_t>>> output_dims(const config::MethodSpec& method,
                                                                  std::span<const Shape> inputs) {
    std::vector<std::vector<std::int64_t>> all;
    for (const config::TensorSpec& output : method.outputs) {
        std::vector<std::int64_t>& dims = all.emplace_back();
        for (const config::DimRange& range : output.shape) {
            if (is_fixed(range)) {
                dims.push_back(keep_dim);
                continue;
            }
            const auto size = size_of_range(method, range, inputs);
            if (!size) return std::nullopt;
            dims.push_back(*size);
        }
    }
    return all;
}

bool ranks_match(const config::MethodSpec& method, std::span<const Shape> inputs) {
    return std::ranges::equal(method.inputs, inputs, [](const config::TensorSpec& spec, Shape dims) {
        return spec.shape.size() == dims.size();
    });
}

}  // namespace

std::vector<config::Bucket> graph_buckets(const config::MethodSpec& method) {
    if (!method.buckets.empty()) return method.buckets;
    config::Bucket implied;
    for (const config::TensorSpec& input : method.inputs) {
        if (!std::ranges::all_of(input.shape, is_fixed)) return {};
        std::vector<std::int64_t>& shape = implied.shapes.emplace_back();
        for (const config::DimRange& range : input.shape) shape.push_back(range.min);
    }
    if (implied.shapes.empty()) return {};
    return {implied};
}

std::int64_t element_count(const config::Bucket& bucket) noexcept {
    std::int64_t total = 0;
    for (const auto& shape : bucket.shapes) {
        std::int64_t product = 1;
        for (const std::int64_t size : shape) product *= size;
        total += product;
    }
    return total;
}

std::string shapes_text(const config::Bucket& bucket) {
    std::string text;
    for (const auto& shape : bucket.shapes) {
        if (!text.empty()) text += ' ';
        text += fmt::format("[{}]", fmt::join(shape, ","));
    }
    return text;
}

BucketChoice choose_bucket(const config::MethodSpec& method, std::span<const config::Bucket> buckets,
                           std::span<const Shape> inputs) {
    if (buckets.empty()) return {.reason = eager_reason::no_buckets};
    std::optional<std::size_t> smallest;
    bool one_fits = false;
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        if (equals(buckets[i], inputs)) return {.bucket = i};
        if (!fits(buckets[i], inputs)) continue;
        one_fits = true;
        if (!may_be_padded(method, buckets[i], inputs)) continue;
        if (!smallest || element_count(buckets[i]) < element_count(buckets[*smallest])) smallest = i;
    }
    if (!one_fits) return {.reason = eager_reason::no_bucket};
    if (!smallest) return {.reason = eager_reason::padding_not_declared};

    if (method.outputs.empty() || !ranks_match(method, inputs)) return {.reason = eager_reason::padding_ambiguous};
    auto cut = output_dims(method, inputs);
    if (!cut) return {.reason = eager_reason::padding_ambiguous};
    return {.bucket = smallest, .padded = true, .output_dims = std::move(*cut), .reason = {}};
}

bool outputs_follow_inputs(const config::MethodSpec& method, const config::Bucket& bucket,
                           std::span<const Shape> outputs) {
    const std::vector<Shape> inputs{bucket.shapes.begin(), bucket.shapes.end()};
    if (!ranks_match(method, inputs)) return false;
    const auto expected = output_dims(method, inputs);
    if (!expected) return false;
    return std::ranges::equal(*expected, outputs, [](const auto& dims, Shape seen) {
        return std::ranges::equal(dims, seen,
                                  [](std::int64_t want, std::int64_t is) { return want == keep_dim || want == is; });
    });
}

}  // namespace bulkhead::worker
