#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/simulation/world.h"

namespace bulkhead::simulation {

/// Who asked for what, when. A file of lines, `#` begins a comment; models come before
/// their arrivals:
///
///     device MIB
///     model NAME MIB LOAD_MS RECLAIM_MS [exclusive GROUP]
///     AT_MS NAME SERVICE_MS
struct Trace {
    struct Model {
        std::string name;
        Bytes bytes = 0;
        Millis load{0};
        Millis reclaim{0};
        std::string exclusive;
    };
    struct Arrival {
        Millis at{0};
        std::string model;
        Millis service{0};
    };
    std::string name;
    Bytes device = 0;
    std::vector<Model> models;
    std::vector<Arrival> arrivals;

    /// Throws std::runtime_error.
    [[nodiscard]] static Trace read(const std::filesystem::path& file);
};

/// What a policy made of a trace.
struct Played {
    std::uint64_t arrivals = 0;
    std::uint64_t hits = 0;   ///< their model was ready
    std::uint64_t swaps = 0;  ///< evictions
    std::uint64_t unanswered = 0;
    Millis wait_median{0};  ///< from arrival to the start of the answer
    Millis wait_p99{0};
    Millis wait_longest{0};
    Millis until_all_answered{0};
};
[[nodiscard]] Played play(const Trace& trace, std::unique_ptr<Decider> decider);

/// A world of one device with the trace's models, nothing asked yet.
void make_world(World& world, const Trace& trace);

/// Two models that exclude each other, and `clients` of each that ask again as soon as
/// they are answered.
struct Alternating {
    std::uint64_t events = 0;
    std::uint64_t answered = 0;
    std::uint64_t swaps = 0;
    Millis wait_longest{0};
};
[[nodiscard]] Alternating alternate(std::unique_ptr<Decider> decider, int models, int clients, Millis load,
                                    Millis service, Millis how_long);

}  // namespace bulkhead::simulation
