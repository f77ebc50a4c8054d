#pragma once

/// Chooses the captured graph for a request. Pure: no tensor, no device.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"

namespace bulkhead::worker {

using Shape = std::span<const std::int64_t>;

/// Why a request ran eagerly, as counted in the member `eager` of `graphs`.
namespace eager_reason {
inline constexpr std::string_view graphs_off = "graphs_off";
/// State lives in the module between requests.
inline constexpr std::string_view stateful = "stateful";
/// The method declares none, and its shapes vary.
inline constexpr std::string_view no_buckets = "no_buckets";
inline constexpr std::string_view no_bucket = "no_bucket";            ///< none is large enough
/// One would fit, but its capture failed.
inline constexpr std::string_view capture_failed = "capture_failed";
inline constexpr std::string_view padding_not_declared = "padding_not_declared";
/// It is unclear how to cut outputs back.
inline constexpr std::string_view padding_ambiguous = "padding_ambiguous";
/// From the captured defaults.
inline constexpr std::string_view parameters_differ = "parameters_differ";
}  // namespace eager_reason

/// Returns the buckets to capture: the declared ones, or the one implied by all-fixed input shapes.
[[nodiscard]] std::vector<config::Bucket> graph_buckets(const config::MethodSpec& method);

/// Elements of all inputs together, for "largest first" and "smallest that fits".
[[nodiscard]] std::int64_t element_count(const config::Bucket& bucket) noexcept;

/// "[1,128] [1,128]"
[[nodiscard]] std::string shapes_text(const config::Bucket& bucket);

struct BucketChoice {
    std::optional<std::size_t> bucket = {};  ///< index among the buckets given; empty: run eagerly
    bool padded = false;
    /// For a padded request, by output: the dims to cut it back to; `keep_dim` for an
    /// unchanged dim.
    std::vector<std::vector<std::int64_t>> output_dims = {};
    std::string_view reason = {};  ///< one of eager_reason if there is no bucket
};
inline constexpr std::int64_t keep_dim = -1;

/// Chooses the bucket of exactly the request's shapes, else the smallest that the declaration
/// allows padding to.
///
/// Padding needs a fill value for every padded input, and outputs whose dims are fixed or follow an
/// input's. An output dim follows the input dims declared with the same range; if those differ in
/// size in this request, padding is ambiguous. An empty dim is never padded. `inputs` are the
/// request's dims in the order of the method's inputs.
[[nodiscard]] BucketChoice choose_bucket(const config::MethodSpec& method, std::span<const config::Bucket> buckets,
                                         std::span<const Shape> inputs);

/// Whether outputs of these dims, seen at this bucket, match what `choose_bucket` assumes: their
/// number, the declared ranks, and varying dims as long as the input dims they follow.
[[nodiscard]] bool outputs_follow_inputs(const config::MethodSpec& method, const config::Bucket& bucket,
                                         std::span<const Shape> outputs);

}  // namespace bulkhead::worker
