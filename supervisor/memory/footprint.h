#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor::memory {

/// Memory of one worker on one device, in bytes. The worker reports `graph_pools` and `slabs`:
/// parts of the first three figures, except for slabs of a GPU worker that lie on the host.
struct Usage {
    Bytes at_ready = 0;
    Bytes load_peak = 0;  ///< weights in flight, capture
    Bytes serving_peak = 0;
    Bytes graph_pools = 0;
    Bytes slabs = 0;
    Bytes mapped = 0;  ///< weights in the page cache: extra; not counted as used, the kernel
                       ///< can reclaim them

    /// Returns what it holds while it serves.
    [[nodiscard]] Bytes resident() const { return std::max(at_ready, serving_peak); }
    /// Returns the most it holds from its start until it is ready.
    [[nodiscard]] Bytes loading() const { return std::max(load_peak, resident()); }
    /// Keeps the larger value of each member.
    void merge(const Usage& other);
    static void members(auto& self, auto&& visit) {
        visit("at_ready", self.at_ready, true);
        visit("load_peak", self.load_peak, true);
        visit("serving_peak", self.serving_peak, true);
        visit("graph_pools", self.graph_pools, true);
        visit("slabs", self.slabs, true);
        visit("mapped", self.mapped, true);
    }
    friend bool operator==(const Usage&, const Usage&) = default;
};

/// What a model gets at least, after memory ran out in spite of its figure.
struct Correction {
    Bytes device = 0;  ///< 0: none
    Bytes host = 0;    ///< beside a GPU; 0: none
    Bytes memory = 0;  ///< as declared at that time; 0: not. Declaring another one ends
                       ///< the correction
    static void members(auto& self, auto&& visit) {
        visit("device", self.device, true);
        visit("host", self.host, true);
        visit("memory", self.memory, true);
    }
    friend bool operator==(const Correction&, const Correction&) = default;
};

/// What was measured of one model with one declaration and file.
struct Footprint {
    Usage device;                  ///< the device it runs on; for a CPU worker the host
    Usage host;                    ///< host memory of a GPU worker
    Millis load{0};                ///< of the last load, from spawn to ready
    Millis reclaim{0};             ///< of the last end, from the end of the drain to the receipt
    std::uint32_t count = 0;       ///< measured loads
    std::int64_t measured_ms = 0;  ///< unix time of the last measurement
    Correction corrected{};
    /// Was it ever measured while it served? Memory of requests and channels is
    /// unknown before that.
    [[nodiscard]] bool has_served() const { return device.serving_peak > 0; }
    static void members(auto& self, auto&& visit) {
        visit("device", self.device, true);
        visit("host", self.host, true);
        visit("load_ms", self.load, true);
        visit("reclaim_ms", self.reclaim, true);
        visit("count", self.count, true);
        visit("measured_ms", self.measured_ms, true);
        visit("corrected", self.corrected, false);
    }
    friend bool operator==(const Footprint&, const Footprint&) = default;
};

/// Where a load's figure comes from.
enum class Basis : std::uint8_t { unknown, measured, package, declared, corrected };
[[nodiscard]] constexpr std::string_view to_string(Basis basis) {
    constexpr std::array<std::string_view, 5> texts{"unknown", "measured", "estimated from its package", "declared",
                                                    "corrected after memory ran out"};
    return texts[static_cast<std::size_t>(basis)];
}

/// The memory that a load takes.
struct Need {
    Bytes device = 0;  ///< 0 with Basis::unknown
    Bytes host = 0;    ///< host memory of a model on a GPU
    Basis basis{};
    [[nodiscard]] Bytes part(bool beside) const { return beside ? host : device; }
};

/// Returns the key for devices of one kind: figures of one kind do not apply to another.
/// `kind`  `kind_of_host`, or what the driver calls the GPU; `unnamed_gpu` where it tells no name
[[nodiscard]] std::string footprint_key(const std::string& declaration, std::string_view kind);
inline constexpr std::string_view kind_of_host = "host";
inline constexpr std::string_view unnamed_gpu = "gpu";

/// All footprints, by `footprint_key`.
class Footprints {
public:
    /// Returns an empty one if nothing was measured.
    [[nodiscard]] const Footprint& find(const std::string& key) const;
    /// Updates for a worker that became ready, served, or ended. Figures only grow, except that a
    /// new load replaces those of the old one, and that a peak before memory ran out is forgotten.
    void loaded(const std::string& key, const Footprint& measured);
    void grew(const std::string& key, const Usage& device, const Usage& host);
    void reclaimed(const std::string& key, Millis took);
    /// Memory ran out.
    void correct(const std::string& key, const Correction& corrected, std::int64_t now_ms);
    /// Forgets peaks above those that the worker started with: a leak is not what the model needs.
    void forget_peaks(const std::string& key, Bytes device, Bytes host);
    /// A worker served, and memory did not run out.
    void served_well(const std::string& key);

    [[nodiscard]] boost::json::object to_json() const;
    /// Skips entries that are not valid footprints: they are measured again.
    [[nodiscard]] static Footprints from_json(const boost::json::value& value);
    friend bool operator==(const Footprints&, const Footprints&) = default;

private:
    /// Returns the entry of the key; a new one replaces the oldest if there are too many.
    Footprint& entry(const std::string& key);
    void keep(std::size_t count);  ///< keeps the latest
    std::map<std::string, Footprint> by_key_;
};

}  // namespace bulkhead::supervisor::memory
