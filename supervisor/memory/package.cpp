#include "supervisor/memory/package.h"

#include "ipc/base/json_codec.h"

namespace bulkhead::supervisor::memory {
namespace {

namespace json = boost::json;

using json_codec::member;

/// Reads a figure from 1 to `max`.
std::optional<std::uint64_t> figure(const json::object& from, std::string_view key, std::uint64_t max) {
    const auto read = member<std::uint64_t>(from, key);
    return read && *read > 0 && *read <= max ? read : std::nullopt;
}

std::optional<std::uint64_t> element_bytes(const std::optional<std::string>& dtype) {
    if (dtype == "float32") return 4;
    if (dtype == "float16" || dtype == "bfloat16") return 2;
    return std::nullopt;
}

}  // namespace

std::optional<PackageSize> package_size(const json::value& manifest, std::optional<std::uint32_t> slots,
                                        std::optional<std::uint32_t> length) {
    constexpr std::uint64_t count_max = std::uint64_t{1} << 20;  // of any one dimension
    const json::object* all = manifest.if_object();
    if (all == nullptr) return std::nullopt;
    const auto part = [&](std::string_view name) { return member<json::object>(*all, name).value_or(json::object{}); };
    const json::object kv = part("kv");
    const auto weight_bytes = figure(part("weights"), "bytes", limits::bytes_max);
    const auto element = element_bytes(member<std::string>(part("dtypes"), "kv"));
    if (!weight_bytes || !element) return std::nullopt;
    Bytes kv_bytes = 2 * *element;  // keys and values
    for (const auto factor : {slots ? std::optional<std::uint64_t>{*slots} : figure(*all, "slots", count_max),
                              length ? std::optional<std::uint64_t>{*length} : figure(*all, "length", count_max),
                              figure(*all, "rows", count_max), figure(kv, "layers", count_max),
                              figure(kv, "heads", count_max), figure(kv, "dim", count_max)}) {
        if (!factor || kv_bytes > limits::bytes_max / *factor) return std::nullopt;
        kv_bytes *= *factor;
    }
    return PackageSize{*weight_bytes, kv_bytes};
}

}  // namespace bulkhead::supervisor::memory
