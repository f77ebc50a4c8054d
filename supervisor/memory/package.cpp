#include "supervisor/memory/package.h"

namespace bulkhead::supervisor::memory {
namespace {

namespace json = boost::json;

/// Reads a figure from 1 to `max`.
std::optional<std::uint64_t> figure(const json::object& from, std::string_view key, std::uint64_t max) {
    const json::value* value = from.if_contains(key);
    if (value == nullptr || !value->is_number()) return std::nullopt;
    boost::system::error_code wrong;
    const auto read = value->to_number<std::uint64_t>(wrong);
    if (wrong || read == 0 || read > max) return std::nullopt;
    return read;
}

const json::object* object(const json::object& from, std::string_view key) {
    const json::value* value = from.if_contains(key);
    return value == nullptr ? nullptr : value->if_object();
}

std::optional<std::uint64_t> element_bytes(const json::object& dtypes, std::string_view key) {
    const json::value* value = dtypes.if_contains(key);
    if (value == nullptr || !value->is_string()) return std::nullopt;
    const std::string_view dtype = value->get_string();
    if (dtype == "float32") return 4;
    if (dtype == "float16" || dtype == "bfloat16") return 2;
    return std::nullopt;
}

}  // namespace

std::optional<PackageSize> package_size(const json::value& manifest, std::optional<std::uint32_t> slots,
                                        std::optional<std::uint32_t> length) {
    constexpr std::uint64_t count_max = std::uint64_t{1} << 20;  // of any one dimension
    const json::object* all = manifest.if_object();
    const json::object* weights = all == nullptr ? nullptr : object(*all, "weights");
    const json::object* kv = all == nullptr ? nullptr : object(*all, "kv");
    const json::object* dtypes = all == nullptr ? nullptr : object(*all, "dtypes");
    if (weights == nullptr || kv == nullptr || dtypes == nullptr) return std::nullopt;
    const auto weight_bytes = figure(*weights, "bytes", limits::bytes_max);
    const auto element = element_bytes(*dtypes, "kv");
    if (!weight_bytes || !element) return std::nullopt;
    Bytes kv_bytes = 2 * *element;  // keys and values
    for (const auto factor : {slots ? std::optional<std::uint64_t>{*slots} : figure(*all, "slots", count_max),
                              length ? std::optional<std::uint64_t>{*length} : figure(*all, "length", count_max),
                              figure(*all, "rows", count_max), figure(*kv, "layers", count_max),
                              figure(*kv, "heads", count_max), figure(*kv, "dim", count_max)}) {
        if (!factor || kv_bytes > limits::bytes_max / *factor) return std::nullopt;
        kv_bytes *= *factor;
    }
    return PackageSize{*weight_bytes, kv_bytes};
}

}  // namespace bulkhead::supervisor::memory
