#pragma once

#include <deque>
#include <map>
#include <string>

#include "tests/simulation/world.h"

namespace bulkhead::simulation {

/// What other programs do on one device: whoever came first is loaded first, at the expense of
/// whoever is idle. Nobody is drained, nobody is protected, and who waits at the head holds up
/// everybody behind.
class Rival : public Decider {
public:
    /// `slots`  models held at most; 0: as many as fit by their sizes
    enum class Victim : std::uint8_t { least_recently_used, oldest_load };
    Rival(std::size_t slots, Victim victim) : slots_{slots}, victim_{victim} {}

    Actions on(const Event& event, Time now) override;

private:
    struct Held {
        enum class State : std::uint8_t { loading, ready, going } state{};
        Bytes bytes = 0;
        std::uint32_t in_flight = 0;
        Time used{};
        std::uint64_t loaded_as = 0;
    };
    struct Waiting {
        Ticket ticket;
        std::string model;
    };
    void settle(Actions& actions, Time now);
    [[nodiscard]] bool has_room(const std::string& model) const;
    [[nodiscard]] bool excludes(const std::string& a, const std::string& b) const;

    std::size_t slots_;
    Victim victim_;
    DeviceId device_;
    Bytes total_ = 0;
    std::map<std::string, Declaration> declared_;
    std::map<std::string, Held> held_;
    std::deque<Waiting> queue_;
    std::uint64_t loads_ = 0;
};

}  // namespace bulkhead::simulation
