#include "supervisor/memory/footprint.h"

#include <algorithm>
#include <array>
#include <utility>

#include "supervisor/memory/limits.h"

namespace bulkhead::supervisor::memory {
namespace json = boost::json;
namespace {

constexpr std::array usage_members{std::pair{"at_ready", &Usage::at_ready},
                                   std::pair{"load_peak", &Usage::load_peak},
                                   std::pair{"serving_peak", &Usage::serving_peak},
                                   std::pair{"graph_pools", &Usage::graph_pools},
                                   std::pair{"slabs", &Usage::slabs},
                                   std::pair{"mapped", &Usage::mapped}};

/// Bounds a figure from a file or a worker so that sums cannot overflow.
Bytes bounded(Bytes bytes) { return std::min<Bytes>(bytes, limits::bytes_max); }

Usage bounded(Usage usage) {
    for (const auto& [name, member] : usage_members) usage.*member = bounded(usage.*member);
    return usage;
}

json::object to_json(const Usage& usage) {
    json::object out;
    for (const auto& [name, member] : usage_members) out.emplace(name, usage.*member);
    return out;
}

std::optional<std::uint64_t> number(const json::object& from, std::string_view key, std::uint64_t max) {
    const json::value* value = from.if_contains(key);
    if (value == nullptr || !value->is_number()) return std::nullopt;
    boost::system::error_code wrong;
    const auto read = value->to_number<std::uint64_t>(wrong);
    if (wrong || read > max) return std::nullopt;
    return read;
}

std::optional<Usage> usage_from(const json::object& from, std::string_view key) {
    const json::value* value = from.if_contains(key);
    if (value == nullptr || !value->is_object()) return std::nullopt;
    Usage usage;
    for (const auto& [name, member] : usage_members) {
        const auto read = number(value->get_object(), name, limits::bytes_max);
        if (!read) return std::nullopt;
        usage.*member = *read;
    }
    return usage;
}

/// Returns no correction where the member is absent, nothing where it is not valid.
std::optional<Correction> correction_from(const json::object& from) {
    const json::value* value = from.if_contains("corrected");
    if (value == nullptr) return Correction{};
    if (!value->is_object()) return std::nullopt;
    const auto device = number(value->get_object(), "device", limits::bytes_max);
    const auto host_bytes = number(value->get_object(), "host", limits::bytes_max);
    const auto memory = number(value->get_object(), "memory", limits::bytes_max);
    if (!device || !host_bytes || !memory) return std::nullopt;
    return Correction{*device, *host_bytes, *memory};
}

std::optional<Footprint> footprint_from(const json::value& value) {
    if (!value.is_object()) return std::nullopt;
    const json::object& from = value.get_object();
    constexpr std::uint64_t ms_max = std::uint64_t{1} << 52;
    const auto device = usage_from(from, "device");
    const auto host_usage = usage_from(from, "host");
    const auto load = number(from, "load_ms", ms_max);
    const auto reclaim = number(from, "reclaim_ms", ms_max);
    const auto count = number(from, "count", UINT32_MAX);
    const auto date = number(from, "measured_ms", ms_max);
    const auto corrected = correction_from(from);
    if (!corrected || !device || !host_usage || !load || !reclaim || !count || !date) return std::nullopt;
    return Footprint{*device,
                     *host_usage,
                     Millis{*load},
                     Millis{*reclaim},
                     static_cast<std::uint32_t>(*count),
                     static_cast<std::int64_t>(*date),
                     *corrected};
}

}  // namespace

void Usage::merge(const Usage& other) {
    for (const auto& [name, member] : usage_members) this->*member = std::max(this->*member, other.*member);
}

std::string_view to_string(Basis basis) {
    switch (basis) {
    case Basis::measured: return "measured";
    case Basis::package: return "estimated from its package";
    case Basis::declared: return "declared";
    case Basis::corrected: return "corrected after memory ran out";
    case Basis::unknown: break;
    }
    return "unknown";
}

std::string footprint_key(const std::string& declaration, bool on_gpu) {
    return declaration + (on_gpu ? "@gpu" : "@host");
}

const Footprint* Footprints::find(const std::string& key) const {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? nullptr : &found->second;
}

void Footprints::loaded(const std::string& key, const Footprint& measured) {
    Footprint& known = entry(key);
    const Bytes served = known.device.serving_peak;
    const Bytes served_on_host = known.host.serving_peak;
    const Millis reclaim = known.reclaim;
    const std::uint32_t count = known.count;
    const Correction corrected = known.corrected;
    known = measured;
    known.device = bounded(known.device);
    known.host = bounded(known.host);
    known.device.serving_peak = std::max(known.device.serving_peak, served);
    known.host.serving_peak = std::max(known.host.serving_peak, served_on_host);
    known.reclaim = reclaim;
    known.count = count + 1;
    known.corrected = corrected;
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
    for (const auto& [key, one] : by_key_)
        out.emplace(key, json::object{{"device", memory::to_json(one.device)},
                                      {"host", memory::to_json(one.host)},
                                      {"load_ms", one.load.count()},
                                      {"reclaim_ms", one.reclaim.count()},
                                      {"count", one.count},
                                      {"measured_ms", one.measured_ms},
                                      {"corrected", json::object{{"device", one.corrected.device},
                                                                 {"host", one.corrected.host},
                                                                 {"memory", one.corrected.memory}}}});
    return out;
}

Footprints Footprints::from_json(const json::value& value) {
    Footprints out;
    if (!value.is_object()) return out;
    for (const auto& [key, member] : value.get_object())
        if (const auto one = footprint_from(member)) out.by_key_.emplace(key, *one);
    out.keep(limits::footprints_max);
    return out;
}

}  // namespace bulkhead::supervisor::memory
