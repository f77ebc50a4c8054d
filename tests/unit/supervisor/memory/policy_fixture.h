#pragma once

#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "supervisor/memory/policy.h"

namespace bulkhead::simulation {

using namespace supervisor::memory;
using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr Bytes gib = Bytes{1} << 30;

/// A policy with GPU-0 of 10 GiB and the host of 32, at one moment of a clock that the test moves.
class PolicyFixture : public testing::Test {
protected:
    PolicyFixture() {
        send(event::Device{DeviceId{host}, 32 * gib, false});
        send(event::Device{"GPU-0", 10 * gib, false});
    }

    static Declaration model(const std::string& name, Bytes memory) {
        Declaration one;
        one.model = one.key = name;
        one.devices = {"GPU-0"};
        one.memory = memory;
        return one;
    }
    void declare(std::vector<Declaration> models, std::map<DeviceId, DeviceLimit> limits = {}) {
        send(event::Declared{std::move(models), std::move(limits)});
    }
    Actions& send(const Event& event) { return actions = policy.on(event, now); }
    Ticket ask(const std::string& name, Asker asker = Asker::channel, std::optional<Time> deadline = {},
               const std::string& client = "ana", bool for_room = false) {
        send(event::LoadAsked{++ticket, name, asker, client, deadline, for_room});
        return ticket;
    }
    void ready(const std::string& name, Bytes bytes, std::uint32_t replica = 0, Millis load = 1s) {
        Footprint measured;
        measured.device.at_ready = measured.device.load_peak = bytes;
        measured.load = load;
        send(event::Ready{{name, replica}, measured});
    }
    /// Loaded by a person, and idle from then on.
    void load(const std::string& name, Bytes bytes) {
        ask(name, Asker::person);
        ready(name, bytes);
    }
    void use(const std::string& name, std::uint32_t requests = 1) { send(event::InFlight{{name, 0}, requests}); }
    void end(const std::string& name, std::uint32_t replica = 0) {
        send(event::Ended{{name, replica}, false, std::nullopt, 1});
        send(event::Receipt{{name, replica}, 100ms});
    }
    template <typename Kind>
    [[nodiscard]] std::vector<Kind> all() const {
        std::vector<Kind> found;
        for (const Action& one : actions)
            if (const auto* it = std::get_if<Kind>(&one)) found.push_back(*it);
        return found;
    }
    /// "a/0 b/0", of the last event.
    [[nodiscard]] std::vector<std::string> evicted() const {
        std::vector<std::string> names;
        for (const auto& one : all<action::Evict>()) names.push_back(one.who.text());
        return names;
    }
    [[nodiscard]] std::vector<std::string> granted() const {
        std::vector<std::string> names;
        for (const auto& one : all<action::Grant>()) names.push_back(one.who.text());
        return names;
    }
    [[nodiscard]] DeviceLedger gpu() const { return policy.ledger().at(1); }

    Policy policy;
    Time now{1h};
    Ticket ticket = 0;
    Actions actions;
};

}  // namespace bulkhead::simulation
