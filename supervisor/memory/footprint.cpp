#include "supervisor/memory/footprint.h"

#include <utility>

#include "ipc/base/json_codec.h"
#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {
namespace json = boost::json;
namespace {

/// Bounds a figure from a file or a worker so that sums cannot overflow.
Bytes bounded(Bytes bytes) { return std::min<Bytes>(bytes, limits::bytes_max); }

Usage bounded(Usage usage) {
    Usage::members(usage, [](std::string_view, Bytes& bytes, bool) { bytes = bounded(bytes); });
    return usage;
}

bool is_sound(const Footprint& one) {
    constexpr std::int64_t ms_max = std::int64_t{1} << 52;
    const auto in_range = [](std::int64_t ms) { return ms >= 0 && ms <= ms_max; };
    return one.device == bounded(one.device) && one.host == bounded(one.host) && in_range(one.load.count()) &&
           in_range(one.reclaim.count()) && in_range(one.measured_ms) &&
           std::max({one.corrected.device, one.corrected.host, one.corrected.memory}) <= limits::bytes_max;
}

}  // namespace

void Usage::merge(const Usage& other) {
    at_ready = std::max(at_ready, other.at_ready);
    load_peak = std::max(load_peak, other.load_peak);
    serving_peak = std::max(serving_peak, other.serving_peak);
    graph_pools = std::max(graph_pools, other.graph_pools);
    slabs = std::max(slabs, other.slabs);
    mapped = std::max(mapped, other.mapped);
}

std::string footprint_key(const std::string& declaration, std::string_view kind) {
    return declaration + '@' + std::string{kind};
}

const Footprint& Footprints::find(const std::string& key) const {
    static const Footprint none{};
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? none : found->second;
}

void Footprints::loaded(const std::string& key, const Footprint& measured) {
    Footprint& known = entry(key);
    const Footprint before = std::exchange(known, measured);
    known.device = bounded(measured.device);
    known.host = bounded(measured.host);
    known.device.serving_peak = std::max(known.device.serving_peak, before.device.serving_peak);
    known.host.serving_peak = std::max(known.host.serving_peak, before.host.serving_peak);
    known.reclaim = before.reclaim;
    known.count = before.count + 1;
    known.corrected = before.corrected;
}

void Footprints::grew(const std::string& key, const Usage& device, const Usage& host_usage) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    found->second.device.merge(bounded(device));
    found->second.host.merge(bounded(host_usage));
}

void Footprints::reclaimed(const std::string& key, Millis took) {
    if (const auto found = by_key_.find(key); found != by_key_.end()) found->second.reclaim = took;
}

void Footprints::correct(const std::string& key, const Correction& corrected, std::int64_t now_ms) {
    Footprint& known = entry(key);
    known.corrected = {bounded(corrected.device), bounded(corrected.host), bounded(corrected.memory)};
    known.measured_ms = now_ms;
}

void Footprints::forget_peaks(const std::string& key, Bytes device, Bytes host_bytes) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return;
    for (auto& [usage, peak] : {std::pair{&found->second.device, device}, {&found->second.host, host_bytes}})
        usage->serving_peak = std::min(usage->serving_peak, peak);
}

void Footprints::served_well(const std::string& key) {
    if (const auto found = by_key_.find(key); found != by_key_.end()) found->second.corrected = {};
}

Footprint& Footprints::entry(const std::string& key) {
    if (!by_key_.contains(key)) keep(limits::footprints_max - 1);
    return by_key_[key];
}

void Footprints::keep(std::size_t count) {
    while (by_key_.size() > count)
        by_key_.erase(std::ranges::min_element(by_key_, {}, [](const auto& one) { return one.second.measured_ms; }));
}

json::object Footprints::to_json() const {
    json::object out;
    for (const auto& [key, one] : by_key_) out[key] = json_codec::encode(one);
    return out;
}

Footprints Footprints::from_json(const json::value& value) {
    Footprints out;
    if (!value.is_object()) return out;
    for (const auto& [key, member] : value.get_object())
        if (Footprint one; json_codec::decode(member, one) && is_sound(one)) out.by_key_.emplace(key, one);
    out.keep(limits::footprints_max);
    return out;
}

}  // namespace bulkhead::supervisor::memory
