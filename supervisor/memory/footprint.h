#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor::memory {

/// Of one worker on one device, in bytes. `graph_pools` and `slabs` are the worker's own word: parts of the first
/// three, but for slabs of a GPU worker that lie on the host.
struct Usage {
    Bytes at_ready = 0;
    Bytes load_peak = 0;  ///< weights in flight, capture
    Bytes serving_peak = 0;
    Bytes graph_pools = 0;
    Bytes slabs = 0;
    Bytes mapped = 0;  ///< weights in the page cache: on top, and never counted as used, since the kernel takes it back

    /// While it serves.
    [[nodiscard]] Bytes resident() const { return std::max(at_ready, serving_peak); }
    /// From its start until it is ready.
    [[nodiscard]] Bytes loading() const { return std::max(load_peak, resident()); }
    /// The larger of each.
    void merge(const Usage& other);
    friend bool operator==(const Usage&, const Usage&) = default;
};

/// What was measured of one model with one declaration and file.
struct Footprint {
    Usage device;                  ///< of the device it runs on; of a CPU worker the host
    Usage host;                    ///< of a GPU worker beside it
    Millis load{0};                ///< the last one, from spawn to ready
    Millis reclaim{0};             ///< the last one, from the end of its drain to the receipt
    std::uint32_t count = 0;       ///< loads that were measured
    std::int64_t measured_ms = 0;  ///< unix time of the last
    /// Whether it was ever measured while it served: what requests and channels take is not known before.
    [[nodiscard]] bool has_served() const { return device.serving_peak > 0; }
    friend bool operator==(const Footprint&, const Footprint&) = default;
};

/// Where a load's figure comes from.
enum class Basis : std::uint8_t { unknown, measured, package, declared };
[[nodiscard]] std::string_view to_string(Basis basis);

/// What a load takes.
struct Need {
    Bytes device = 0;  ///< 0 with Basis::unknown
    Bytes host = 0;    ///< beside a GPU
    Basis basis{};
};

/// Of a model on a GPU, or on the host: the figures of one say nothing of the other.
[[nodiscard]] std::string footprint_key(const std::string& declaration, bool on_gpu);

/// All footprints, by `footprint_key`.
class Footprints {
public:
    [[nodiscard]] const Footprint* find(const std::string& key) const;
    /// Of a worker that became ready, served, or ended: figures only grow, but those of a new load replace the old
    /// ones.
    void loaded(const std::string& key, const Footprint& measured);
    void grew(const std::string& key, const Usage& device, const Usage& host);
    void reclaimed(const std::string& key, Millis took);
    /// Memory ran out at `had` bytes, while it loaded or served: a quarter more from now on.
    /// `beside`  of the host's memory, of a worker on a GPU
    void ran_out(const std::string& key, Bytes had, bool loading, bool beside, std::int64_t now_ms);

    [[nodiscard]] boost::json::object to_json() const;
    /// What does not read as a footprint is left out: it is measured again.
    [[nodiscard]] static Footprints from_json(const boost::json::value& value);
    friend bool operator==(const Footprints&, const Footprints&) = default;

private:
    /// Of this key; a new one takes the place of the oldest where there are too many.
    Footprint& entry(const std::string& key);
    void keep(std::size_t count);  ///< the latest
    std::map<std::string, Footprint> by_key_;
};

}  // namespace bulkhead::supervisor::memory
