#pragma once

/// Which captured graph a request may use. Pure: no tensor, no device.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"

namespace bulkhead::worker {

using Shape = std::span<const std::int64_t>;

/// Why a request ran eagerly, as counted in `graphs`' member `eager`.
namespace eager_reason {
inline constexpr std::string_view graphs_off = "graphs_off";
inline constexpr std::string_view stateful = "stateful";              ///< state lives in the module between requests
inline constexpr std::string_view no_buckets = "no_buckets";          ///< the method declares none, and a shape varies
inline constexpr std::string_view no_bucket = "no_bucket";            ///< none is large enough
inline constexpr std::string_view capture_failed = "capture_failed";  ///< one would fit, but is not captured
inline constexpr std::string_view padding_not_declared = "padding_not_declared";
inline constexpr std::string_view padding_ambiguous = "padding_ambiguous";  ///< how to cut outputs back is unclear
inline constexpr std::string_view parameters_differ = "parameters_differ";  ///< from the captured defaults
}  // namespace eager_reason

/// The buckets that get a graph: those declared, or the one that all-fixed input shapes imply.
[[nodiscard]] std::vector<config::Bucket> graph_buckets(const config::MethodSpec& method);

/// Elements of all inputs together: what "largest first" and "smallest that fits" mean.
[[nodiscard]] std::int64_t element_count(const config::Bucket& bucket) noexcept;

/// "[1,128] [1,128]"
[[nodiscard]] std::string shapes_text(const config::Bucket& bucket);

struct BucketChoice {
    std::optional<std::size_t> bucket = {};  ///< index among the buckets given; empty: run eagerly
    bool padded = false;
    /// Of a padded request, by output: the dims to cut it back to, with `keep_dim` where a dim stays as it is.
    std::vector<std::vector<std::int64_t>> output_dims = {};
    std::string_view reason = {};  ///< one of eager_reason where there is no bucket
};
inline constexpr std::int64_t keep_dim = -1;

/// The bucket of exactly the request's shapes, else the smallest to which the declaration lets it be padded.
///
/// Padding needs a fill value for every input that is padded, and outputs whose dims are fixed or follow an
/// input's: a dim of an output follows the input dims that were declared with the same range. Where those
/// have different sizes in this request, it is ambiguous. An empty dim is never padded.
/// `inputs` are the request's dims in the order of the method's inputs.
[[nodiscard]] BucketChoice choose_bucket(const config::MethodSpec& method, std::span<const config::Bucket> buckets,
                                         std::span<const Shape> inputs);

/// Whether outputs of these dims, seen at this bucket, are what `choose_bucket` assumes: as many, of the
/// declared rank, varying dims as long as the input dims they follow.
[[nodiscard]] bool outputs_follow_inputs(const config::MethodSpec& method, const config::Bucket& bucket,
                                         std::span<const Shape> outputs);

}  // namespace bulkhead::worker
